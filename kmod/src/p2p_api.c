// SPDX-License-Identifier: MIT OR GPL-2.0-only
/*
 * Finds the GPU driver's functions when they are needed. This module has no dependency on any driver: it loads without,
 * serves whichever flavour is loaded at the time of a pin, lets it be unloaded when nothing is pinned, and cannot be
 * bound at link time to a stub that was installed for building.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kallsyms.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/string.h>

#include "gdr.h"
#include "p2p_api.h"

/* Counts loading and unloading of modules. */
static atomic_t gdr_modules = ATOMIC_INIT(1);
/* The count at which no driver was found: the kernel logs each search for a symbol that is not exported to GPL. */
static atomic_t gdr_searched = ATOMIC_INIT(0);

static int gdr_module_event(struct notifier_block *block, unsigned long event, void *data)
{
	if (event == MODULE_STATE_LIVE || event == MODULE_STATE_GOING)
		atomic_inc(&gdr_modules);
	return NOTIFY_DONE;
}

static struct notifier_block gdr_module_notifier = { .notifier_call = gdr_module_event };

int gdr_p2p_api_init(void)
{
	return register_module_notifier(&gdr_module_notifier);
}

void gdr_p2p_api_exit(void)
{
	unregister_module_notifier(&gdr_module_notifier);
}

/* "nvidia_p2p_get_pages [nvidia]" has the module's name. */
static bool gdr_owner_of(void *function, char *name, size_t size)
{
	char text[KSYM_SYMBOL_LEN];
	char *open, *close;

	snprintf(text, sizeof(text), "%ps", function);
	open = strchr(text, '[');
	close = open ? strpbrk(open, " ]") : NULL;
	if (!close)
		return false;
	*close = '\0';
	strscpy(name, open + 1, size);
	return true;
}

/* GDRCopy's build has a module of this name whose functions refuse everything. */
static bool gdr_is_dummy(void *function)
{
	char name[MODULE_NAME_LEN];

	return gdr_owner_of(function, name, sizeof(name)) && !strcmp(name, "nv_p2p_dummy");
}

void gdr_p2p_api_put(struct gdr_p2p_api *api)
{
	if (api->put_persistent)
		symbol_put(nvidia_p2p_put_pages_persistent);
	if (api->get_persistent)
		symbol_put(nvidia_p2p_get_pages_persistent);
	if (api->free_page_table)
		symbol_put(nvidia_p2p_free_page_table);
	if (api->put_pages)
		symbol_put(nvidia_p2p_put_pages);
	if (api->get_pages)
		symbol_put(nvidia_p2p_get_pages);
	memset(api, 0, sizeof(*api));
}

/* -ENODEV without a driver that can be used. */
int gdr_p2p_api_get(struct gdr_p2p_api *api)
{
	int now = atomic_read(&gdr_modules);
	bool dummy = false;

	memset(api, 0, sizeof(*api));
	if (atomic_read(&gdr_searched) == now)
		return -ENODEV;
	api->get_pages = symbol_get(nvidia_p2p_get_pages);
	if (!api->get_pages)
		goto none;
	dummy = gdr_is_dummy(api->get_pages);
	if (dummy)
		goto none;
	api->put_pages = symbol_get(nvidia_p2p_put_pages);
	api->free_page_table = symbol_get(nvidia_p2p_free_page_table);
	if (!api->put_pages || !api->free_page_table)
		goto none;
	api->get_persistent = symbol_get(nvidia_p2p_get_pages_persistent);
	if (api->get_persistent) {
		api->put_persistent = symbol_get(nvidia_p2p_put_pages_persistent);
		if (!api->put_persistent)
			goto none;
	}
	return 0;

none:
	gdr_p2p_api_put(api);
	/* A driver may have come meanwhile, so what was true of the count before is noted. */
	if (atomic_xchg(&gdr_searched, now) != now)
		pr_warn("%s\n", dummy ? "nv-p2p-dummy is loaded in place of the NVIDIA driver: rmmod nv-p2p-dummy" :
				"no NVIDIA driver exports nvidia_p2p_get_pages (to GPL modules): only dma-bufs can be pinned");
	return -ENODEV;
}

/* The module that serves pins, for /proc; false without one. */
bool gdr_p2p_driver(char *name, size_t size)
{
	struct gdr_p2p_api api;
	bool found;

	if (gdr_p2p_api_get(&api))
		return false;
	found = gdr_owner_of(api.get_pages, name, size);
	gdr_p2p_api_put(&api);
	return found;
}
