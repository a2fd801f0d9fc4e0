/* SPDX-License-Identifier: MIT OR GPL-2.0-only WITH Linux-syscall-note */
/*
 * User interface of /dev/gdrdrv.
 *
 * Numbers 1 to 8 and 255 are those of GDRCopy 2.6: NVIDIA's library and programs built for it work unchanged.
 * 0xC0 and attributes from GDRDRV_ATTR_EXTENSIONS on are this module's own.
 */
#ifndef GDRDRV_ABI_H
#define GDRDRV_ABI_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define GDRDRV_MAGIC 0xDA

/* A version is major << 16 | minor. */
#define GDRDRV_ABI_VERSION 0x00020006
#define GDRDRV_ABI_MIN_LIBRARY 0x00020000

struct gdrdrv_pin {
	__u64 addr;
	__u64 size;
	__u64 p2p_token; /* 0 with persistent mappings */
	__u32 va_space; /* likewise */
	__u32 pad;
	__u64 handle; /* out */
};

struct gdrdrv_unpin {
	__u64 handle;
};

struct gdrdrv_cb_flag {
	__u64 handle;
	__u32 flag; /* out: 1 once the memory was freed under the pin */
	__u32 pad;
};

struct gdrdrv_info {
	__u64 handle;
	__u64 va; /* out, as all below */
	__u64 mapped_size;
	__u32 page_size;
	__u32 tsc_khz;
	__u64 tm_cycles;
	__u32 mapped;
	__u32 wc_mapping;
};

struct gdrdrv_info_v2 {
	__u64 handle;
	__u64 va; /* out, as all below */
	__u64 mapped_size;
	__u32 page_size;
	__u32 tsc_khz;
	__u64 tm_cycles;
	__u32 mapping_type;
	__u32 pad;
};

enum gdrdrv_attr_number {
	GDRDRV_ATTR_PERSISTENT = 1,
	GDRDRV_ATTR_FORCE_PCIE = 2,
	/* Bits GDRDRV_EXT_*; NVIDIA's module knows no such attribute (EINVAL). */
	GDRDRV_ATTR_EXTENSIONS = 0x1000,
};

/* GDRDRV_IOC_PIN_DMABUF works on this machine. */
#define GDRDRV_EXT_DMABUF 1

struct gdrdrv_attr {
	__u32 attr;
	__u32 val; /* out */
};

#define GDRDRV_PIN_FORCE_PCIE 1

struct gdrdrv_pin_v2 {
	__u64 addr;
	__u64 size;
	__u32 flags;
	__u32 pad;
	__u64 handle; /* out */
};

enum gdrdrv_mapping_type {
	GDRDRV_MAPPING_NONE = 0,
	GDRDRV_MAPPING_WC = 1,
	GDRDRV_MAPPING_CACHED = 2,
	GDRDRV_MAPPING_DEVICE = 3,
};

struct gdrdrv_mapping_request {
	__u64 handle;
	__u32 mapping_type; /* of the next mmap; NONE: the module chooses */
	__u32 pad;
};

struct gdrdrv_version {
	__u32 driver; /* out */
	__u32 minimum_library; /* out */
};

/*
 * Pins part of a dma-buf. The handle serves unpin, info, callback flag, mapping type and mmap like any other. offset
 * and size are whole host pages. The module takes its own reference: the descriptor may be closed.
 *
 * EBADF no descriptor, EACCES one that cannot be written, EINVAL no dma-buf, unknown flags or a range outside it,
 * EOPNOTSUPP where DMA addresses are not CPU addresses or the exporter lets no peer in, else what the exporter says.
 */
struct gdrdrv_pin_dmabuf {
	__s32 fd;
	__u32 flags; /* none are defined: 0 */
	__u64 offset;
	__u64 size;
	__u64 handle; /* out */
};

/* GDRCopy encodes the size of a pointer, whatever the structure, in all numbers but 1 and 7. */
#define GDRDRV_IOC_PIN _IOWR(GDRDRV_MAGIC, 1, struct gdrdrv_pin)
#define GDRDRV_IOC_UNPIN _IOWR(GDRDRV_MAGIC, 2, void *)
#define GDRDRV_IOC_CB_FLAG _IOWR(GDRDRV_MAGIC, 3, void *)
#define GDRDRV_IOC_INFO _IOWR(GDRDRV_MAGIC, 4, void *)
#define GDRDRV_IOC_INFO_V2 _IOWR(GDRDRV_MAGIC, 5, void *)
#define GDRDRV_IOC_ATTR _IOWR(GDRDRV_MAGIC, 6, void *)
#define GDRDRV_IOC_PIN_V2 _IOWR(GDRDRV_MAGIC, 7, struct gdrdrv_pin_v2)
#define GDRDRV_IOC_MAPPING_TYPE _IOWR(GDRDRV_MAGIC, 8, void *)
#define GDRDRV_IOC_PIN_DMABUF _IOWR(GDRDRV_MAGIC, 0xC0, struct gdrdrv_pin_dmabuf)
#define GDRDRV_IOC_VERSION _IOWR(GDRDRV_MAGIC, 255, void *)

#endif
