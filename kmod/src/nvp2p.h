/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The peer-to-peer interface that NVIDIA's driver exports to other modules ("GPUDirect RDMA" in the CUDA
 * documentation), as far as it is used here: declarations of our own, so that nothing of NVIDIA is needed to build.
 */
#ifndef GDR_NVP2P_H
#define GDR_NVP2P_H

#include <linux/types.h>

/* A version is major << 16 | minor. */
#define NVP2P_TABLE_HAS_FLAGS 0x00010003
#define NVP2P_TABLE_CACHEABLE 1

enum { NVP2P_PAGE_4K, NVP2P_PAGE_64K, NVP2P_PAGE_128K };

#define NVP2P_FORCE_BAR1 1

struct nvidia_p2p_page {
	u64 physical_address;
	u32 registers[6];
};

struct nvidia_p2p_page_table {
	u32 version;
	u32 page_size;
	struct nvidia_p2p_page **pages;
	u32 entries;
	u8 *gpu_uuid;
	u32 flags; /* from NVP2P_TABLE_HAS_FLAGS on */
};

/*
 * The callback says that the memory is being freed: on return nothing may use the pages. It may sleep; it must not call
 * nvidia_p2p_put_pages(), which waits for it.
 */
int nvidia_p2p_get_pages(u64 token, u32 va_space, u64 addr, u64 len, struct nvidia_p2p_page_table **table,
			 void (*freed)(void *data), void *data);
int nvidia_p2p_put_pages(u64 token, u32 va_space, u64 addr, struct nvidia_p2p_page_table *table);
int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *table);

/* R535 and newer: the pages stay until they are put, also when the memory is freed. */
int nvidia_p2p_get_pages_persistent(u64 addr, u64 len, struct nvidia_p2p_page_table **table, u32 flags);
int nvidia_p2p_put_pages_persistent(u64 addr, struct nvidia_p2p_page_table *table, u32 flags);

#endif
