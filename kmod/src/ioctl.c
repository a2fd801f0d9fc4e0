// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* The requests: a table, so that copying in and out stands once. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/uaccess.h>
#ifdef CONFIG_X86
#include <asm/tsc.h>
#endif

#include "gdr.h"

union gdr_args {
	struct gdrdrv_pin pin;
	struct gdrdrv_unpin unpin;
	struct gdrdrv_cb_flag cb_flag;
	struct gdrdrv_info info;
	struct gdrdrv_info_v2 info_v2;
	struct gdrdrv_attr attr;
	struct gdrdrv_pin_v2 pin_v2;
	struct gdrdrv_mapping_request mapping;
	struct gdrdrv_pin_dmabuf pin_dmabuf;
	struct gdrdrv_version version;
};

static int gdr_ioc_pin(struct gdr_file *file, union gdr_args *args)
{
	const struct gdr_p2p_request request = {
		.addr = args->pin.addr,
		.size = args->pin.size,
		.token = args->pin.p2p_token,
		.va_space = args->pin.va_space,
	};

	return gdr_p2p_pin(file, &request, &args->pin.handle);
}

static int gdr_ioc_pin_v2(struct gdr_file *file, union gdr_args *args)
{
	const struct gdr_p2p_request request = {
		.addr = args->pin_v2.addr,
		.size = args->pin_v2.size,
		.flags = args->pin_v2.flags,
	};

	return gdr_p2p_pin(file, &request, &args->pin_v2.handle);
}

static int gdr_ioc_pin_dmabuf(struct gdr_file *file, union gdr_args *args)
{
	struct gdrdrv_pin_dmabuf *p = &args->pin_dmabuf;

	if (p->flags)
		return -EINVAL;
	return gdr_dmabuf_pin(file, p->fd, p->offset, p->size, &p->handle);
}

static int gdr_unpin(struct gdr_file *file, u64 handle)
{
	struct gdr_pin *pin = gdr_pin_take(file, handle);

	if (!pin)
		return -EINVAL;
	gdr_pin_destroy(pin);
	return 0;
}

static int gdr_ioc_unpin(struct gdr_file *file, union gdr_args *args)
{
	return gdr_unpin(file, args->unpin.handle);
}

static int gdr_ioc_cb_flag(struct gdr_file *file, union gdr_args *args)
{
	struct gdr_pin *pin = gdr_pin_find(file, args->cb_flag.handle);

	if (!pin)
		return -EINVAL;
	args->cb_flag.flag = READ_ONCE(pin->revoked);
	args->cb_flag.pad = 0;
	gdr_pin_put(pin);
	return 0;
}

static u32 gdr_tsc_khz(void)
{
#ifdef CONFIG_X86
	return tsc_khz;
#else
	return 0;
#endif
}

static u32 gdr_pin_type(const struct gdr_pin *pin)
{
	return atomic_read(&pin->maps) ? READ_ONCE(pin->type) : GDRDRV_MAPPING_NONE;
}

static int gdr_ioc_info_v2(struct gdr_file *file, union gdr_args *args)
{
	struct gdr_pin *pin = gdr_pin_find(file, args->info_v2.handle);

	if (!pin)
		return -EINVAL;
	args->info_v2 = (struct gdrdrv_info_v2) {
		.handle = pin->handle,
		.va = pin->va,
		.mapped_size = pin->size,
		.page_size = pin->page_size,
		.tsc_khz = gdr_tsc_khz(),
		.tm_cycles = pin->cycles,
		.mapping_type = gdr_pin_type(pin),
	};
	gdr_pin_put(pin);
	return 0;
}

static int gdr_ioc_info(struct gdr_file *file, union gdr_args *args)
{
	u32 type;
	int ret;

	ret = gdr_ioc_info_v2(file, args);
	if (ret)
		return ret;
	/* Up to the type both structures are alike. */
	type = args->info_v2.mapping_type;
	args->info.mapped = type != GDRDRV_MAPPING_NONE;
	args->info.wc_mapping = type == GDRDRV_MAPPING_WC;
	return 0;
}

static int gdr_ioc_attr(struct gdr_file *file, union gdr_args *args)
{
	struct gdrdrv_attr *p = &args->attr;

	switch (p->attr) {
	case GDRDRV_ATTR_PERSISTENT:
		p->val = gdr_p2p_persistent();
		return 0;
	case GDRDRV_ATTR_FORCE_PCIE:
		p->val = gdr_force_pcie && gdr_p2p_persistent();
		return 0;
	case GDRDRV_ATTR_EXTENSIONS:
		p->val = gdr_importer() ? GDRDRV_EXT_DMABUF : 0;
		return 0;
	default:
		return -EINVAL;
	}
}

static int gdr_ioc_mapping_type(struct gdr_file *file, union gdr_args *args)
{
	u32 wish = args->mapping.mapping_type;
	struct gdr_pin *pin;
	int ret;

	if (wish > GDRDRV_MAPPING_DEVICE)
		return -EINVAL;
	pin = gdr_pin_find(file, args->mapping.handle);
	if (!pin)
		return -EINVAL;
	pin->source->lock(pin);
	if (pin->gone)
		ret = -EINVAL;
	else if (atomic_read(&pin->maps))
		ret = -EBUSY;
	else
		ret = min(gdr_type_choose(pin, wish), 0);
	if (!ret)
		pin->wish = wish;
	pin->source->unlock(pin);
	gdr_pin_put(pin);
	return ret;
}

static int gdr_ioc_version(struct gdr_file *file, union gdr_args *args)
{
	args->version.driver = GDRDRV_ABI_VERSION;
	args->version.minimum_library = GDRDRV_ABI_MIN_LIBRARY;
	return 0;
}

/* A pin whose handle the caller does not get to know is of no use. Somebody may have guessed it and unpinned. */
static void gdr_undo_pin(struct gdr_file *file, const union gdr_args *args)
{
	gdr_unpin(file, args->pin.handle);
}

static void gdr_undo_pin_v2(struct gdr_file *file, const union gdr_args *args)
{
	gdr_unpin(file, args->pin_v2.handle);
}

static void gdr_undo_pin_dmabuf(struct gdr_file *file, const union gdr_args *args)
{
	gdr_unpin(file, args->pin_dmabuf.handle);
}

struct gdr_request {
	unsigned int cmd;
	bool no_answer;
	size_t size;
	int (*serve)(struct gdr_file *file, union gdr_args *args);
	/* Takes it back when the answer cannot be delivered. */
	void (*undo)(struct gdr_file *file, const union gdr_args *args);
};

static const struct gdr_request gdr_requests[] = {
	{ GDRDRV_IOC_PIN, false, sizeof(struct gdrdrv_pin), gdr_ioc_pin, gdr_undo_pin },
	{ GDRDRV_IOC_UNPIN, true, sizeof(struct gdrdrv_unpin), gdr_ioc_unpin },
	{ GDRDRV_IOC_CB_FLAG, false, sizeof(struct gdrdrv_cb_flag), gdr_ioc_cb_flag },
	{ GDRDRV_IOC_INFO, false, sizeof(struct gdrdrv_info), gdr_ioc_info },
	{ GDRDRV_IOC_INFO_V2, false, sizeof(struct gdrdrv_info_v2), gdr_ioc_info_v2 },
	{ GDRDRV_IOC_ATTR, false, sizeof(struct gdrdrv_attr), gdr_ioc_attr },
	{ GDRDRV_IOC_PIN_V2, false, sizeof(struct gdrdrv_pin_v2), gdr_ioc_pin_v2, gdr_undo_pin_v2 },
	{ GDRDRV_IOC_MAPPING_TYPE, true, sizeof(struct gdrdrv_mapping_request), gdr_ioc_mapping_type },
	{ GDRDRV_IOC_PIN_DMABUF, false, sizeof(struct gdrdrv_pin_dmabuf), gdr_ioc_pin_dmabuf,
	  gdr_undo_pin_dmabuf },
	{ GDRDRV_IOC_VERSION, false, sizeof(struct gdrdrv_version), gdr_ioc_version },
};

static const struct gdr_request *gdr_request_find(unsigned int cmd)
{
	size_t i;

	for (i = 0; i < ARRAY_SIZE(gdr_requests); i++)
		if (gdr_requests[i].cmd == cmd)
			return &gdr_requests[i];
	return NULL;
}

long gdr_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct gdr_file *file = filp->private_data;
	void __user *user = (void __user *)arg;
	const struct gdr_request *request;
	union gdr_args args;
	int ret;

	if (_IOC_TYPE(cmd) != GDRDRV_MAGIC)
		return -EINVAL;
	if (!gdr_file_is_mine(file))
		return -EACCES;
	request = gdr_request_find(cmd);
	if (!request)
		return -ENOTTY;
	memset(&args, 0, sizeof(args));
	if (copy_from_user(&args, user, request->size))
		return -EFAULT;
	ret = request->serve(file, &args);
	gdr_dbg("request %u of process %d: %d\n", _IOC_NR(cmd), task_tgid_nr(current), ret);
	if (ret || request->no_answer)
		return ret;
	if (copy_to_user(user, &args, request->size)) {
		if (request->undo)
			request->undo(file, &args);
		return -EFAULT;
	}
	return 0;
}
