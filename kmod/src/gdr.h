/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
#ifndef GDR_H
#define GDR_H

#include <linux/atomic.h>
#include <linux/bits.h>
#include <linux/completion.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/xarray.h>

#include "gdrdrv_abi.h"

#ifndef CONFIG_64BIT
#error "handles of 64 bits are page offsets: this module needs a 64-bit kernel"
#endif

#define GDR_NAME "gdrdrv"

/* In units of this the GPU driver pins. */
#define GDR_GPU_PAGE_SHIFT 16
#define GDR_GPU_PAGE_SIZE BIT_ULL(GDR_GPU_PAGE_SHIFT)
#define GDR_GPU_PAGE_MASK (~(GDR_GPU_PAGE_SIZE - 1))

struct gdr_pin;

/* Where the pages of a pin come from. */
struct gdr_source {
	/* The lock under which the pages of a pin come and go. */
	void (*lock)(struct gdr_pin *pin);
	int (*lock_killable)(struct gdr_pin *pin);
	void (*unlock)(struct gdr_pin *pin);
	/* Makes pin->runs valid before they are mapped; called with the lock held, may sleep. */
	int (*prepare)(struct gdr_pin *pin);
	/* Gives the pages back: the pin is not mapped and nobody else can find it any more. */
	void (*release)(struct gdr_pin *pin);
	/*
	 * RAM among its pages may have been anybody's: a mapping that goes round the caches would show what they have
	 * not written back yet.
	 */
	bool cached_ram;
	/* Frees the structure that the pin is part of. Until then the lock works. */
	void (*free)(struct gdr_pin *pin);
};

/* Physically contiguous pages. */
struct gdr_run {
	u64 offset; /* from the start of the pin */
	u64 len;
	phys_addr_t phys;
};

/* One open file: the process that opened it and its pins. */
struct gdr_file {
	struct pid *owner;
	struct inode *inode; /* an address space of its own, so that offsets mean this file's pins */
	struct xarray pins; /* by handle */
	struct mutex handle_lock;
	u64 next_handle;
};

struct gdr_pin {
	struct kref ref; /* the file's table and each VMA */
	struct gdr_file *file; /* valid while mapped or in the table */
	const struct gdr_source *source;
	u64 handle; /* page offset for mmap */
	u64 va;
	u64 size;
	u32 page_size;
	bool published;
	bool unaligned; /* the address asked for does not begin a page of the GPU */
	u64 cycles; /* that pinning took */

	/* Under the lock of the source: */
	bool gone; /* unpinned: never to be mapped again */
	bool revoked; /* freed by the driver: likewise */
	bool ram;
	bool cacheable;
	struct gdr_run *runs;
	size_t nr_runs;
	size_t nr_reserved; /* runs whose memory type is reserved as write-combining */
	u32 wish; /* enum gdrdrv_mapping_type */

	atomic_t maps; /* VMAs; two only in the middle of an mremap that will fail */
	u32 type; /* of the mapping, if there is one */
};

/* Counters of /proc/driver/gdrdrv/stats. */
struct gdr_stats {
	atomic64_t files;
	atomic64_t pins;
	atomic64_t bytes;
	atomic64_t get_pages; /* outstanding at the GPU driver */
	atomic64_t dmabufs;
	atomic64_t mappings;
	atomic64_t total_pins;
	atomic64_t total_maps;
	atomic64_t faults;
	atomic64_t revoked;
	atomic64_t moved;
};

extern struct gdr_stats gdr_stats;
extern bool gdr_use_persistent;
extern bool gdr_force_pcie;
extern bool gdr_dmabuf_enabled;
extern unsigned long long gdr_first_handle;
extern bool gdr_debug;
extern bool gdr_info;

#define gdr_dbg(fmt, ...) \
	do { \
		if (gdr_debug) \
			pr_info_ratelimited(fmt, ##__VA_ARGS__); \
	} while (0)
#define gdr_say(fmt, ...) \
	do { \
		if (gdr_debug || gdr_info) \
			pr_info_ratelimited(fmt, ##__VA_ARGS__); \
	} while (0)

/* file.c */
extern const struct file_operations gdr_fops;
bool gdr_file_is_mine(const struct gdr_file *file);

/* ioctl.c */
long gdr_ioctl(struct file *filp, unsigned int cmd, unsigned long arg);

/* pin.c */
int gdr_pin_init(struct gdr_pin *pin, struct gdr_file *file, const struct gdr_source *source, u64 size);
int gdr_pin_publish(struct gdr_pin *pin);
struct gdr_pin *gdr_pin_find(struct gdr_file *file, u64 handle);
struct gdr_pin *gdr_pin_take(struct gdr_file *file, u64 handle);
void gdr_pin_put(struct gdr_pin *pin);
void gdr_pin_destroy(struct gdr_pin *pin);
void gdr_pin_zap(struct gdr_pin *pin);
void gdr_pin_revoke_locked(struct gdr_pin *pin);
int gdr_errno(int ret);

/* runs.c */
int gdr_runs_alloc(struct gdr_pin *pin, size_t most);
void gdr_runs_add(struct gdr_pin *pin, phys_addr_t phys, u64 len);
int gdr_runs_done(struct gdr_pin *pin, bool cacheable);
void gdr_runs_drop(struct gdr_pin *pin);
const struct gdr_run *gdr_runs_find(const struct gdr_pin *pin, u64 offset);

/* type.c */
void gdr_type_init(void);
int gdr_type_choose(const struct gdr_pin *pin, u32 wish);
pgprot_t gdr_type_prot(u32 type, pgprot_t prot);
bool gdr_type_holds(const struct gdr_pin *pin);

/* map.c */
int gdr_mmap(struct file *filp, struct vm_area_struct *vma);

/* p2p.c */
struct gdr_p2p_request {
	u64 addr;
	u64 size;
	u64 token;
	u32 va_space;
	u32 flags;
};

int gdr_p2p_init(void);
void gdr_p2p_exit(void);
int gdr_p2p_pin(struct gdr_file *file, const struct gdr_p2p_request *request, u64 *handle);
bool gdr_p2p_persistent(void);
bool gdr_p2p_driver(char *name, size_t size);

/* importer.c */
void gdr_importer_init(void);
void gdr_importer_exit(void);
struct device *gdr_importer(void);

/* dmabuf.c */
int gdr_dmabuf_pin(struct gdr_file *file, int fd, u64 offset, u64 size, u64 *handle);

/* proc.c */
int gdr_proc_init(void);
void gdr_proc_exit(void);

#endif
