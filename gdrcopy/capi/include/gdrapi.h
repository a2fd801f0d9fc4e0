/*
 * GPU memory in the address space of the CPU: the C interface of GDRCopy 2.6.
 *
 * Source and binary compatible with NVIDIA's header and library of that name. Link with -lgdrapi.
 *
 * The life of a mapping:
 *
 *     gdr_t g = gdr_open();
 *     gdr_mh_t mh;
 *     gdr_pin_buffer(g, d_addr, size, 0, 0, &mh);      any address inside a CUDA allocation
 *     void *base;
 *     gdr_map(g, mh, &base, size);
 *     gdr_info_t info;
 *     gdr_get_info(g, mh, &info);
 *     char *p = (char *)base + (d_addr - info.va);     the byte at d_addr
 *     gdr_copy_to_mapping(mh, p, data, size);
 *     gdr_unmap(g, mh, base, size);
 *     gdr_unpin_buffer(g, mh);
 *     gdr_close(g);
 *
 * Functions return 0 or an error number of <errno.h>, if they return int. Any thread may call any of them. A forked
 * child must open for itself: with its parent's handles it gets EACCES.
 *
 * Environment:
 *     GDRCOPY_ENABLE_LOGGING      if set, to whatever: messages go to standard error
 *     GDRCOPY_LOG_LEVEL           least level printed: 1 debug, 2 information, 3 warnings, 4 errors (default)
 *     GDRCOPY_USE_DMABUF_MMAP     "1": map through dma-bufs of CUDA, or not at all
 *     GDRCOPY_BACKEND             gdrdrv, dmabuf, rm or host: this way of mapping, or none; see gdrx_backend
 */

#ifndef GDRAPI_H
#define GDRAPI_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

/* Versions are packed as major << 16 | minor. */
#define MAJOR_VERSION_SHIFT 16
#define MINOR_VERSION_MASK (((uint32_t)1 << MAJOR_VERSION_SHIFT) - 1)

#define GDR_API_MAJOR_VERSION 2
#define GDR_API_MINOR_VERSION 6
#define GDR_API_VERSION ((GDR_API_MAJOR_VERSION << MAJOR_VERSION_SHIFT) | GDR_API_MINOR_VERSION)

/* The oldest kernel module that works. */
#define MINIMUM_GDRDRV_MAJOR_VERSION 2
#define MINIMUM_GDRDRV_MINOR_VERSION 0
#define MINIMUM_GDRDRV_VERSION ((MINIMUM_GDRDRV_MAJOR_VERSION << MAJOR_VERSION_SHIFT) | MINIMUM_GDRDRV_MINOR_VERSION)

/* Pages of GPU memory. */
#define GPU_PAGE_SHIFT 16
#define GPU_PAGE_SIZE (1UL << GPU_PAGE_SHIFT)
#define GPU_PAGE_OFFSET (GPU_PAGE_SIZE - 1)
#define GPU_PAGE_MASK (~GPU_PAGE_OFFSET)

#ifdef __cplusplus
extern "C" {
#endif

/* An opened library. Not a pointer to anything. */
struct gdr;
typedef struct gdr *gdr_t;

/* A pin. 0 is never one. */
typedef struct gdr_mh_s {
    unsigned long h;
} gdr_mh_t;

/* ---- Opening ---------------------------------------------------------------------------------------------------- */

/*
 * Opens the library on the first way of mapping that can work here. Returns NULL if none can: errno is ENODEV, or
 * EINVAL for a name in GDRCOPY_BACKEND that does not exist, and the log says what was tried and why it failed.
 *
 * Does not touch CUDA, so children that are forked afterwards may use it. Without the kernel module, the first
 * gdr_pin_buffer or gdrx_alloc initialises CUDA, makes a primary context and tries a mapping. ENODEV there: no way of
 * mapping works after all; the next call tries again.
 */
gdr_t gdr_open(void);

/*
 * Closes it: unpins and frees what is left, all of it even if a part fails; the first error. Mappings that are left go as
 * with gdr_unpin_buffer. EINVAL: not open; EACCES: opened by the parent process.
 */
int gdr_close(gdr_t g);

/* ---- Pinning ---------------------------------------------------------------------------------------------------- */

/*
 * Pins size bytes of GPU memory at addr, in any alignment. The range may leave its CUDA allocation as far as the GPU
 * pages, or the driver's block of memory, around it reach. The tokens are ignored; give 0.
 * EINVAL: no GPU memory that can be mapped, a range beyond that; ENOMEM: BAR1 is full; ENODEV: see gdr_open.
 */
int gdr_pin_buffer(gdr_t g, unsigned long addr, size_t size, uint64_t p2p_token, uint32_t va_space, gdr_mh_t *handle);

typedef enum gdr_pin_flags {
    GDR_PIN_FLAG_DEFAULT = 0,
    /* Through PCIe also where CPU and GPU have a coherent link; see GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE. */
    GDR_PIN_FLAG_FORCE_PCIE = 1
} gdr_pin_flags_t;

/* Pins with flags. EINVAL also for flags that are unknown, or not to be had here. */
int gdr_pin_buffer_v2(gdr_t g, unsigned long addr, size_t size, uint32_t flags, gdr_mh_t *handle);

/*
 * Unpins. The handle is gone also if that fails. Unmap first: a mapping that is left shows no memory any more, touching it
 * raises SIGBUS, and its addresses stay taken until the process ends, in few mappings of the kernel. gdr_unmap is EINVAL
 * then.
 */
int gdr_unpin_buffer(gdr_t g, gdr_mh_t handle);

/*
 * *flag becomes 1 once the driver has taken the memory away because the program freed it, which an access then shows
 * by SIGBUS; 0 where pins hold the memory (GDR_ATTR_USE_PERSISTENT_MAPPING).
 */
int gdr_get_callback_flag(gdr_t g, gdr_mh_t handle, int *flag);

/* How the CPU caches a mapping. */
typedef enum gdr_mapping_type {
    GDR_MAPPING_TYPE_NONE = 0,
    /* Write combining: stores leave late and in any order, loads are slow. BAR1 on x86. */
    GDR_MAPPING_TYPE_WC = 1,
    /* Cached and coherent like host memory. */
    GDR_MAPPING_TYPE_CACHING = 2,
    /* Device memory of Arm: accesses must be aligned. */
    GDR_MAPPING_TYPE_DEVICE = 3,
    GDR_MAPPING_TYPE_MAX
} gdr_mapping_type_t;

typedef struct gdr_info_v2 {
    /* First GPU address that is pinned: the one asked for, rounded down to page_size. */
    uint64_t va;
    /* Bytes pinned from va. */
    uint64_t mapped_size;
    uint32_t page_size;
    /* Deprecated in GDRCopy; always 0. */
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    /* Whether there is a mapping, and whether it is write combining. */
    unsigned mapped : 1;
    unsigned wc_mapping : 1;
    gdr_mapping_type_t mapping_type;
} gdr_info_v2_t;
typedef gdr_info_v2_t gdr_info_t;

int gdr_get_info_v2(gdr_t g, gdr_mh_t handle, gdr_info_v2_t *info);

/* The symbol gdr_get_info itself fills the shorter structure that programs before GDRCopy 2.4 have. */
#define gdr_get_info gdr_get_info_v2

/* ---- Mapping ---------------------------------------------------------------------------------------------------- */

/*
 * Maps a pin; one mapping at a time, pin again for another. *va becomes the address of info.va, so the byte at d_addr is
 * at *va + (d_addr - info.va). size counts from the address that was pinned, and may be less than what was pinned.
 * EAGAIN: mapped already; EINVAL: size 0 or more than mapped_size.
 */
int gdr_map(gdr_t g, gdr_mh_t handle, void **va, size_t size);

/* One of these, not a mask. */
typedef enum gdr_map_flags {
    GDR_MAP_FLAG_DEFAULT = 0,
    GDR_MAP_FLAG_REQ_WC_MAPPING = 1,
    GDR_MAP_FLAG_REQ_CACHE_MAPPING = 2,
    GDR_MAP_FLAG_REQ_DEVICE_MAPPING = 3
} gdr_map_flags_t;

/* Maps with a type of your choice. EOPNOTSUPP: the platform lacks it. */
int gdr_map_v2(gdr_t g, gdr_mh_t handle, void **ptr_va, size_t size, int flags);

/* Unmaps. EINVAL: not mapped, or not at this address with this size (up to GPU pages). */
int gdr_unmap(gdr_t g, gdr_mh_t handle, void *va, size_t size);

/* ---- Copying ---------------------------------------------------------------------------------------------------- */

/*
 * Copy size bytes between host memory and a mapping by CPU instructions. map_d_ptr is anywhere in the mapping.
 *
 * CUDA work that is submitted afterwards sees the bytes. A kernel that is already running may see them late and in any
 * order. A copy to the mapping ends with a store fence: it is ordered before later stores of this thread.
 *
 * EINVAL: not mapped, or out of the mapping. No other thread may unmap meanwhile.
 */
int gdr_copy_to_mapping(gdr_mh_t handle, void *map_d_ptr, const void *h_ptr, size_t size);
int gdr_copy_from_mapping(gdr_mh_t handle, void *h_ptr, const void *map_d_ptr, size_t size);

/* ---- Asking ----------------------------------------------------------------------------------------------------- */

/* Version of this interface: 2.6. */
void gdr_runtime_get_version(int *major, int *minor);

/* Version of the kernel module; 2.6 where none is in use. */
int gdr_driver_get_version(gdr_t g, int *major, int *minor);

typedef enum gdr_attr {
    /* 1: a mapping outlives the freeing of its memory, and shows the old bytes until unmapped. */
    GDR_ATTR_USE_PERSISTENT_MAPPING = 1,
    /* 1: GDR_PIN_FLAG_FORCE_PCIE is known. It may still be refused for a platform without coherent link. */
    GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE = 2,
    /* 1: mapping goes through dma-bufs. */
    GDR_ATTR_USING_DMA_BUF_MMAP = 3,
    GDR_ATTR_MAX
} gdr_attr_t;

/*
 * EINVAL: no such attribute. 0 for one that the module in use is too old for. Before the first pin it is that of the way
 * of mapping which will most probably be taken.
 */
int gdr_get_attribute(gdr_t g, gdr_attr_t attr, int *v);

/* "None", "Write Combining", "Caching" or "Device"; the string lives for ever. EINVAL: no such type. */
int gdr_get_mapping_type_string(gdr_mapping_type_t mapping_type, const char **pstr);

/* ---- Not in GDRCopy --------------------------------------------------------------------------------------------- */

/* Defined where the functions below are declared. */
#define GDRX_EXTENSIONS 1

/*
 * Allocates GPU memory on a CUDA device that can be pinned and mapped, aligned to GPU pages; with GDRCOPY_BACKEND=host,
 * plain memory on "device" 0. Freed by gdrx_free or gdr_close.
 */
int gdrx_alloc(gdr_t g, int device, size_t size, unsigned long *d_addr);

/* Frees what gdrx_alloc gave. Pins and mappings of it stay and show the old bytes. */
int gdrx_free(gdr_t g, unsigned long d_addr);

/* Copy memory of gdrx_alloc the way the GPU does, not through a mapping; in place on return. */
int gdrx_copy_in(gdr_t g, unsigned long d_addr, const void *src, size_t size);
int gdrx_copy_out(gdr_t g, void *dst, unsigned long d_addr, size_t size);

/*
 * The way of mapping in use, or before the first pin, the one that will most probably be taken: "gdrdrv" (the kernel
 * module), "dmabuf" (CUDA 13.3 and newer), "rm" (the interface of stock NVIDIA drivers) or "host" (plain memory), a string
 * that lives for ever. NULL: g is not open.
 */
const char *gdrx_backend(gdr_t g);

/* Writes one line for people: that name, and why the others before it are not taken. ERANGE: cut to fit len bytes. */
int gdrx_describe(gdr_t g, char *buf, size_t len);

#ifdef __cplusplus
}
#endif

#endif
