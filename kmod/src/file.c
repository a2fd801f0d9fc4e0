// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* Open files: each belongs to the process that opened it. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/mount.h>
#include <linux/pseudo_fs.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "gdr.h"

static struct vfsmount *gdr_mount;
static int gdr_mounted;

static int gdr_fs_context(struct fs_context *fc)
{
	return init_pseudo(fc, 0x67647264) ? 0 : -ENOMEM;
}

static struct file_system_type gdr_fs = {
	.name = GDR_NAME,
	.owner = THIS_MODULE,
	.init_fs_context = gdr_fs_context,
	.kill_sb = kill_anon_super,
};

/* Handles are offsets of this file alone; zapping one must not reach the mappings of another open of the node. */
static struct inode *gdr_inode_new(void)
{
	struct inode *inode;
	int ret;

	ret = simple_pin_fs(&gdr_fs, &gdr_mount, &gdr_mounted);
	if (ret)
		return ERR_PTR(ret);
	inode = alloc_anon_inode(gdr_mount->mnt_sb);
	if (IS_ERR(inode))
		simple_release_fs(&gdr_mount, &gdr_mounted);
	return inode;
}

static void gdr_inode_free(struct inode *inode)
{
	iput(inode);
	simple_release_fs(&gdr_mount, &gdr_mounted);
}

bool gdr_file_is_mine(const struct gdr_file *file)
{
	/* The reference keeps the number from being given to another process. */
	return task_tgid(current) == file->owner;
}

static int gdr_open(struct inode *inode, struct file *filp)
{
	struct gdr_file *file;

	file = kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);
	if (!file)
		return -ENOMEM;
	file->inode = gdr_inode_new();
	if (IS_ERR(file->inode)) {
		int ret = PTR_ERR(file->inode);

		kfree(file);
		return ret;
	}
	xa_init_flags(&file->pins, XA_FLAGS_ACCOUNT);
	mutex_init(&file->handle_lock);
	file->next_handle = gdr_first_handle;
	file->owner = get_pid(task_tgid(current));
	filp->private_data = file;
	filp->f_mapping = file->inode->i_mapping;
	atomic64_inc(&gdr_stats.files);
	return 0;
}

/* The last reference is gone, and every VMA holds one: nothing is mapped. Any process may get here. */
static int gdr_release(struct inode *inode, struct file *filp)
{
	struct gdr_file *file = filp->private_data;
	struct gdr_pin *pin;
	unsigned long handle;

	xa_for_each(&file->pins, handle, pin) {
		xa_erase(&file->pins, handle);
		gdr_pin_destroy(pin);
	}
	xa_destroy(&file->pins);
	put_pid(file->owner);
	gdr_inode_free(file->inode);
	kfree(file);
	atomic64_dec(&gdr_stats.files);
	return 0;
}

const struct file_operations gdr_fops = {
	.owner = THIS_MODULE,
	.open = gdr_open,
	.release = gdr_release,
	.unlocked_ioctl = gdr_ioctl,
	.mmap = gdr_mmap,
	.llseek = noop_llseek,
};
