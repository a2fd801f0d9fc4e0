// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* The device file of the made-up GPU. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/uaccess.h>

#include "provider.h"

struct counters counters;
atomic_t faults[PROVIDER_FAULTS];

static int provider_open(struct inode *inode, struct file *filp)
{
	filp->private_data = NULL;
	return 0;
}

static int provider_release(struct inode *inode, struct file *filp)
{
	struct object *object = filp->private_data;

	if (object) {
		range_hide_all(object);
		object_put(object);
	}
	return 0;
}

static int provider_create(struct file *filp, const struct provider_create *args)
{
	struct object *object = object_new(args->size, args->backing);

	if (IS_ERR(object))
		return PTR_ERR(object);
	if (cmpxchg(&filp->private_data, NULL, object)) {
		object_put(object);
		return -EBUSY;
	}
	return 0;
}

static int provider_set_fault(const struct provider_set_fault *args)
{
	if (args->which >= PROVIDER_FAULTS)
		return -EINVAL;
	atomic_set(&faults[args->which], args->value);
	if (!fault(PROVIDER_FAULT_COPYING))
		copy_end();
	if (!fault(PROVIDER_FAULT_PUT))
		held_end_kept();
	return 0;
}

static void provider_state(struct provider_state *state)
{
	state->objects = atomic64_read(&counters.objects);
	state->chunks = atomic64_read(&counters.chunks);
	state->pins = atomic64_read(&counters.pins);
	state->tables = atomic64_read(&counters.tables);
	state->callbacks = atomic64_read(&counters.callbacks);
	state->misuse = atomic64_read(&counters.misuse);
	state->attachments = atomic64_read(&counters.attachments);
	state->dma_mappings = atomic64_read(&counters.dma_mappings);
}

static long provider_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	union {
		struct provider_create create;
		struct provider_show show;
		struct provider_hide hide;
		struct provider_export export;
		struct provider_move move;
		struct provider_set_fault fault;
		struct provider_state state;
	} args;
	struct object *object = READ_ONCE(filp->private_data);
	void __user *user = (void __user *)arg;
	int ret;

	if (_IOC_TYPE(cmd) != 'G' || _IOC_SIZE(cmd) > sizeof(args))
		return -ENOTTY;
	memset(&args, 0, sizeof(args));
	if ((_IOC_DIR(cmd) & _IOC_WRITE) && copy_from_user(&args, user, _IOC_SIZE(cmd)))
		return -EFAULT;
	switch (cmd) {
	case PROVIDER_CREATE:
		return provider_create(filp, &args.create);
	case PROVIDER_SET_FAULT:
		return provider_set_fault(&args.fault);
	case PROVIDER_STATE:
		provider_state(&args.state);
		return copy_to_user(user, &args, sizeof(args.state)) ? -EFAULT : 0;
	}
	if (!object)
		return -EINVAL;
	switch (cmd) {
	case PROVIDER_SHOW:
		return range_show(object, args.show.va, args.show.offset, args.show.len);
	case PROVIDER_HIDE:
		return range_hide(object, args.hide.va);
	case PROVIDER_MOVE:
		return atomic_read(&object->tables) ? -EBUSY : object_move(object, args.move.backing);
	case PROVIDER_EXPORT:
		ret = object_export(object, args.export.offset, args.export.len, args.export.read_only);
		if (ret < 0)
			return ret;
		args.export.fd = ret;
		return copy_to_user(user, &args, sizeof(args.export)) ? -EFAULT : 0;
	}
	return -ENOTTY;
}

static ssize_t provider_read(struct file *filp, char __user *user, size_t len, loff_t *offset)
{
	struct object *object = READ_ONCE(filp->private_data);

	return (object ? object_copy(object, *offset, user, len, false) : -EINVAL) ?: (ssize_t)len;
}

static ssize_t provider_write(struct file *filp, const char __user *user, size_t len, loff_t *offset)
{
	struct object *object = READ_ONCE(filp->private_data);

	return (object ? object_copy(object, *offset, (char __user *)user, len, true) : -EINVAL) ?: (ssize_t)len;
}

static const struct file_operations provider_fops = {
	.owner = THIS_MODULE,
	.open = provider_open,
	.release = provider_release,
	.unlocked_ioctl = provider_ioctl,
	.read = provider_read,
	.write = provider_write,
	.llseek = noop_llseek,
};

static struct miscdevice provider_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "gdr_provider",
	.fops = &provider_fops,
	.mode = 0666,
};

static int __init provider_init(void)
{
	int ret = bar_init();

	if (ret)
		return ret;
	ret = misc_register(&provider_device);
	if (ret)
		bar_exit();
	return ret;
}

static void __exit provider_exit(void)
{
	misc_deregister(&provider_device);
	copy_end();
	held_end_kept();
	bar_exit();
}

module_init(provider_init);
module_exit(provider_exit);

MODULE_DESCRIPTION("A made-up GPU driver, to test gdrdrv");
MODULE_AUTHOR("The gdasync authors");
MODULE_LICENSE("Dual MIT/GPL");
