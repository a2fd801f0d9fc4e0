// SPDX-License-Identifier: MIT OR GPL-2.0-only
/*
 * gdrdrv: CPU mappings of GPU memory for user space, in the interface of NVIDIA's module of that name.
 *
 * Locks, outermost first: mmap_lock; the lock of a pin's source (a mutex for the GPU driver's pages, the reservation
 * lock for dma-bufs); i_mmap. The table of pins has its own spinlock inside the xarray. Nothing is copied from or to
 * user space, and the GPU driver is not called, under any of them.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/module.h>

#include "compat.h"
#include "gdr.h"

struct gdr_stats gdr_stats;

/* The first three have the names and meaning of NVIDIA's module, so that old modprobe.d files still hold. */
bool gdr_debug;
module_param_named(dbg_enabled, gdr_debug, bool, 0644);
MODULE_PARM_DESC(dbg_enabled, "Log every request (default 0)");

bool gdr_info;
module_param_named(info_enabled, gdr_info, bool, 0644);
MODULE_PARM_DESC(info_enabled, "Log what is unusual (default 0)");

bool gdr_use_persistent = true;
module_param_named(use_persistent_mapping, gdr_use_persistent, bool, 0444);
MODULE_PARM_DESC(use_persistent_mapping,
		 "Keep freed GPU memory until it is unpinned; 0 for MIG and vGPU (default 1)");

bool gdr_force_pcie = true;
module_param_named(force_pcie, gdr_force_pcie, bool, 0444);
MODULE_PARM_DESC(force_pcie, "Let pins ask for PCIe: NVIDIA driver R570 or newer (default 1)");

bool gdr_dmabuf_enabled = true;
module_param_named(dmabuf, gdr_dmabuf_enabled, bool, 0444);
MODULE_PARM_DESC(dmabuf, "Allow pins of dma-bufs (default 1)");

unsigned long long gdr_first_handle;
module_param_named(first_handle, gdr_first_handle, ullong, 0444);
MODULE_PARM_DESC(first_handle, "First handle of every open file, to test programs with large ones (default 0)");

static unsigned int gdr_mode = 0666;
module_param_named(device_mode, gdr_mode, uint, 0444);
MODULE_PARM_DESC(device_mode, "Permissions of /dev/gdrdrv before udev rules (default 0666)");

static dev_t gdr_devt;
static struct cdev gdr_cdev;

static char *gdr_devnode(GDR_DEVNODE_CONST struct device *dev, umode_t *mode)
{
	if (mode)
		*mode = gdr_mode & 0777;
	return NULL;
}

/* Registered statically: class_create() has changed its arguments. */
static struct class gdr_class = {
	.name = GDR_NAME,
	.devnode = gdr_devnode,
};

/*
 * A number of its own rather than a misc device, because the scripts of GDRCopy look for a line "gdrdrv" in
 * /proc/devices; devtmpfs makes the node.
 */
static int __init gdr_device_init(void)
{
	struct device *dev;
	int ret;

	ret = alloc_chrdev_region(&gdr_devt, 0, 1, GDR_NAME);
	if (ret)
		return ret;
	cdev_init(&gdr_cdev, &gdr_fops);
	gdr_cdev.owner = THIS_MODULE;
	ret = cdev_add(&gdr_cdev, gdr_devt, 1);
	if (ret)
		goto out_region;
	ret = class_register(&gdr_class);
	if (ret)
		goto out_cdev;
	dev = device_create(&gdr_class, NULL, gdr_devt, NULL, GDR_NAME);
	if (IS_ERR(dev)) {
		ret = PTR_ERR(dev);
		goto out_class;
	}
	return 0;

out_class:
	class_unregister(&gdr_class);
out_cdev:
	cdev_del(&gdr_cdev);
out_region:
	unregister_chrdev_region(gdr_devt, 1);
	return ret;
}

static void gdr_device_exit(void)
{
	device_destroy(&gdr_class, gdr_devt);
	class_unregister(&gdr_class);
	cdev_del(&gdr_cdev);
	unregister_chrdev_region(gdr_devt, 1);
}

static int __init gdr_init(void)
{
	int ret;

	ret = gdr_p2p_init();
	if (ret)
		return ret;
	gdr_type_init();
	gdr_importer_init();
	ret = gdr_proc_init();
	if (ret)
		goto out_importer;
	ret = gdr_device_init();
	if (ret)
		goto out_proc;
	pr_info("interface %u.%u, major number %u, %s mappings, dma-bufs %s\n", GDRDRV_ABI_VERSION >> 16,
		GDRDRV_ABI_VERSION & 0xffff, MAJOR(gdr_devt), gdr_use_persistent ? "persistent" : "volatile",
		gdr_importer() ? "too" : "not available");
	return 0;

out_proc:
	gdr_proc_exit();
out_importer:
	gdr_importer_exit();
	gdr_p2p_exit();
	return ret;
}

static void __exit gdr_exit(void)
{
	gdr_device_exit();
	gdr_proc_exit();
	gdr_importer_exit();
	gdr_p2p_exit();
}

module_init(gdr_init);
module_exit(gdr_exit);

MODULE_DESCRIPTION("CPU mappings of GPU memory (gdrdrv interface)");
MODULE_AUTHOR("The gdasync authors");
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION("0.1.0");
GDR_IMPORT_NS(DMA_BUF);
