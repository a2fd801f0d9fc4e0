/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * /dev/gdr_provider: a GPU for tests. An open file is an object of memory; it is read and written with pread and pwrite
 * (as a GPU would), shown under made-up device addresses of its process, and exported as a dma-buf.
 */
#ifndef PROVIDER_ABI_H
#define PROVIDER_ABI_H

#include <linux/ioctl.h>
#include <linux/types.h>

enum provider_backing {
	PROVIDER_RAM,
	PROVIDER_BAR, /* memory of a PCI device: QEMU's ivshmem */
};

struct provider_create {
	__u64 size; /* whole pages of 64 KiB */
	__u32 backing;
	__u32 pad;
};

/* From here on nvidia_p2p_get_pages finds the object at this address, in this process. */
struct provider_show {
	__u64 va;
	__u64 offset;
	__u64 len;
};

/* As if the memory were freed: pins that are not persistent lose it. */
struct provider_hide {
	__u64 va;
};

struct provider_export {
	__u64 offset;
	__u64 len;
	__u32 read_only;
	__s32 fd; /* out */
};

/* Gives the object other memory with the same bytes; tells the importers of its dma-bufs. */
struct provider_move {
	__u32 backing;
	__u32 pad;
};

/* What goes wrong from now on, for everybody; 0 ends it. */
enum provider_fault {
	PROVIDER_FAULT_GET, /* errno of get_pages */
	PROVIDER_FAULT_VERSION, /* of the page table */
	PROVIDER_FAULT_PAGE_SIZE, /* its number + 1 */
	PROVIDER_FAULT_ENTRIES, /* so many too few */
	PROVIDER_FAULT_MISALIGNED,
	PROVIDER_FAULT_NO_TABLE,
	PROVIDER_FAULT_PUT, /* errno of put_pages, which then keeps the pages */
	PROVIDER_FAULT_DELAY, /* ms before get_pages returns, while a callback may come */
	PROVIDER_FAULT_ATTACH, /* errno of a dma-buf */
	PROVIDER_FAULT_MAP, /* errno of a dma-buf */
	PROVIDER_FAULT_TABLE_ODD, /* a dma-buf's table with pieces of half a page */
	PROVIDER_FAULT_CACHEABLE, /* the flag of the page table */
	PROVIDER_FAULT_COPYING, /* moves are not over before this is ended */
	PROVIDER_FAULTS,
};

struct provider_set_fault {
	__u32 which;
	__s32 value;
};

struct provider_state {
	__u64 objects;
	__u64 chunks;
	__u64 pins;
	__u64 tables;
	__u64 callbacks;
	__u64 misuse; /* what a user of the interface must never do */
	__u64 attachments;
	__u64 dma_mappings;
};

#define PROVIDER_CREATE _IOW('G', 1, struct provider_create)
#define PROVIDER_SHOW _IOW('G', 2, struct provider_show)
#define PROVIDER_HIDE _IOW('G', 3, struct provider_hide)
#define PROVIDER_EXPORT _IOWR('G', 4, struct provider_export)
#define PROVIDER_MOVE _IOW('G', 5, struct provider_move)
#define PROVIDER_SET_FAULT _IOW('G', 6, struct provider_set_fault)
#define PROVIDER_STATE _IOR('G', 7, struct provider_state)

#endif
