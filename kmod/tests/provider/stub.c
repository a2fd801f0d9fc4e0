// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* Modules that export the names and must not be used. */
#include <linux/errno.h>
#include <linux/module.h>

#include "../../src/nvp2p.h"

int nvidia_p2p_get_pages(u64 token, u32 va_space, u64 va, u64 len, struct nvidia_p2p_page_table **table,
			 void (*freed)(void *data), void *data)
{
	return -EPERM;
}

STUB_EXPORT(nvidia_p2p_get_pages);

int nvidia_p2p_put_pages(u64 token, u32 va_space, u64 va, struct nvidia_p2p_page_table *table)
{
	return -EPERM;
}

STUB_EXPORT(nvidia_p2p_put_pages);

int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *table)
{
	return -EPERM;
}

STUB_EXPORT(nvidia_p2p_free_page_table);

MODULE_DESCRIPTION("Exports that gdrdrv must not use");
MODULE_LICENSE("Dual MIT/GPL");
