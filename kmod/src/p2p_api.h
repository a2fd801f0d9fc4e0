/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
#ifndef GDR_P2P_API_H
#define GDR_P2P_API_H

#include "nvp2p.h"

/* The GPU driver's functions, each with a reference that keeps the driver from being unloaded. */
struct gdr_p2p_api {
	typeof(&nvidia_p2p_get_pages) get_pages;
	typeof(&nvidia_p2p_put_pages) put_pages;
	typeof(&nvidia_p2p_free_page_table) free_page_table;
	typeof(&nvidia_p2p_get_pages_persistent) get_persistent; /* NULL in older drivers, with the next */
	typeof(&nvidia_p2p_put_pages_persistent) put_persistent;
};

int gdr_p2p_api_init(void);
void gdr_p2p_api_exit(void);
int gdr_p2p_api_get(struct gdr_p2p_api *api);
void gdr_p2p_api_put(struct gdr_p2p_api *api);

#endif
