// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* /proc/driver/gdrdrv: the files of NVIDIA's module, and counters. */
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "gdr.h"

static struct proc_dir_entry *gdr_dir;

static int gdr_params_show(struct seq_file *out, void *unused)
{
	char name[MODULE_NAME_LEN];

	seq_printf(out, "Version: %u.%u\n", GDRDRV_ABI_VERSION >> 16, GDRDRV_ABI_VERSION & 0xffff);
	seq_puts(out, "Built for NVIDIA driver flavor: any\n");
	seq_printf(out, "NVIDIA driver: %s\n", gdr_p2p_driver(name, sizeof(name)) ? name : "none");
	seq_printf(out, "Use persistent mapping: %s\n", gdr_p2p_persistent() ? "yes" : "no");
	seq_printf(out, "dma-bufs: %s\n", gdr_importer() ? "yes" : "no");
	seq_printf(out, "dbg_enabled: %d\n", gdr_debug);
	seq_printf(out, "info_enabled: %d\n", gdr_info);
	return 0;
}

static int gdr_refcount_show(struct seq_file *out, void *unused)
{
	seq_printf(out, "%lld\n", atomic64_read(&gdr_stats.get_pages));
	return 0;
}

static int gdr_stats_show(struct seq_file *out, void *unused)
{
	const struct {
		const char *name;
		const atomic64_t *value;
	} lines[] = {
		{ "open_files", &gdr_stats.files },
		{ "pins", &gdr_stats.pins },
		{ "pinned_bytes", &gdr_stats.bytes },
		{ "driver_page_tables", &gdr_stats.get_pages },
		{ "dmabuf_attachments", &gdr_stats.dmabufs },
		{ "mappings", &gdr_stats.mappings },
		{ "total_pins", &gdr_stats.total_pins },
		{ "total_mappings", &gdr_stats.total_maps },
		{ "total_faults", &gdr_stats.faults },
		{ "total_revoked", &gdr_stats.revoked },
		{ "total_moved", &gdr_stats.moved },
	};
	size_t i;

	for (i = 0; i < ARRAY_SIZE(lines); i++)
		seq_printf(out, "%s %lld\n", lines[i].name, atomic64_read(lines[i].value));
	return 0;
}

int gdr_proc_init(void)
{
	gdr_dir = proc_mkdir("driver/" GDR_NAME, NULL);
	if (!gdr_dir)
		return -ENOMEM;
	if (!proc_create_single("params", 0444, gdr_dir, gdr_params_show) ||
	    !proc_create_single("nv_get_pages_refcount", 0440, gdr_dir, gdr_refcount_show) ||
	    !proc_create_single("stats", 0444, gdr_dir, gdr_stats_show)) {
		gdr_proc_exit();
		return -ENOMEM;
	}
	return 0;
}

void gdr_proc_exit(void)
{
	proc_remove(gdr_dir);
}
