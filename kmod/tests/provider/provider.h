/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
#ifndef PROVIDER_H
#define PROVIDER_H

#include <linux/atomic.h>
#include <linux/dma-resv.h>
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/sizes.h>

#include "provider_abi.h"

#define CHUNK SZ_64K

/* 64 KiB of memory. */
struct chunk {
	phys_addr_t phys;
	void *cpu; /* for the "GPU" */
	u32 backing;
};

struct object {
	struct kref ref; /* the file, page tables, dma-bufs */
	u64 size;
	struct mutex lock; /* what the chunks are, against reads and writes */
	struct dma_resv resv; /* likewise, against dma-bufs */
	struct chunk *chunks;
	struct list_head dmabufs; /* under resv */
	atomic_t tables; /* that hold chunks: no move */
};

/* Device addresses of a process. */
struct shown {
	struct list_head link;
	struct pid *owner;
	struct object *object;
	u64 va, offset, len;
};

struct counters {
	atomic64_t objects, chunks, pins, tables, callbacks, misuse, attachments, dma_mappings;
};

extern struct counters counters;
extern atomic_t faults[PROVIDER_FAULTS];

static inline int fault(enum provider_fault which)
{
	return atomic_read(&faults[which]);
}

/* object.c */
int bar_init(void);
void bar_exit(void);
struct object *object_new(u64 size, u32 backing);
void object_put(struct object *object);
int object_copy(struct object *object, u64 offset, char __user *user, size_t len, bool write);
int object_move(struct object *object, u32 backing);

/* p2p.c */
int range_show(struct object *object, u64 va, u64 offset, u64 len);
int range_hide(struct object *object, u64 va);
void range_hide_all(struct object *object);
void held_end_kept(void);

/* export.c */
int object_export(struct object *object, u64 offset, u64 len, bool read_only);
void object_moved(struct object *object);

/* copy.c */
int copy_begin(struct dma_resv *resv);
void copy_end(void);

#endif
