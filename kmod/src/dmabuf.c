// SPDX-License-Identifier: MIT OR GPL-2.0-only
/*
 * Pages from a dma-buf.
 *
 * dma_buf_mmap() would be the exporter's mapping under the exporter's rules, which user space can have without this
 * module, and the exporters that matter here have none: NVIDIA's driver until CUDA 13.3. dma_buf_vmap() maps into the
 * kernel. So this is an importer like an RDMA adapter: attached dynamically, with peer memory allowed, told when the
 * exporter moves the buffer, and giving nobody more than a registration with such an adapter does.
 *
 * An importer gets DMA addresses for its device. Those of the device here (importer.c) are CPU addresses: it is behind
 * no IOMMU and reaches all memory directly. Where that does not hold there are no pins of dma-bufs.
 *
 * Pages are mapped by faults under the reservation lock, and zapped under it when the exporter moves them: the next
 * access finds the new place.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-buf.h>
#include <linux/dma-resv.h>
#include <linux/overflow.h>
#include <linux/slab.h>
#include <linux/timex.h>

#include "compat.h"
#include "gdr.h"

struct gdr_dmabuf_pin {
	struct gdr_pin pin;
	struct dma_buf *dmabuf;
	struct dma_buf_attachment *attachment;
	struct sg_table *sgt; /* while pin.runs are valid */
	u64 offset;
};

static struct gdr_dmabuf_pin *to_dmabuf(struct gdr_pin *pin)
{
	return container_of(pin, struct gdr_dmabuf_pin, pin);
}

static void gdr_dmabuf_lock(struct gdr_pin *pin)
{
	dma_resv_lock(to_dmabuf(pin)->dmabuf->resv, NULL);
}

static int gdr_dmabuf_lock_killable(struct gdr_pin *pin)
{
	return dma_resv_lock_interruptible(to_dmabuf(pin)->dmabuf->resv, NULL);
}

static void gdr_dmabuf_unlock(struct gdr_pin *pin)
{
	dma_resv_unlock(to_dmabuf(pin)->dmabuf->resv);
}

/* Cuts the pin's range out of the whole buffer. */
static int gdr_dmabuf_read_table(struct gdr_dmabuf_pin *d)
{
	u64 skip = d->offset, rest = d->pin.size;
	struct scatterlist *sg;
	int i, ret;

	ret = gdr_runs_alloc(&d->pin, d->sgt->nents);
	if (ret)
		return ret;
	for_each_sgtable_dma_sg(d->sgt, sg, i) {
		u64 addr = sg_dma_address(sg), len = sg_dma_len(sg);

		if (!PAGE_ALIGNED(addr) || !PAGE_ALIGNED(len))
			return -EIO;
		if (skip >= len) {
			skip -= len;
			continue;
		}
		len = min(len - skip, rest);
		gdr_runs_add(&d->pin, addr + skip, len);
		skip = 0;
		rest -= len;
		if (!rest)
			return gdr_runs_done(&d->pin, false);
	}
	return -EIO;
}

/* The pages must be out of all page tables. */
static void gdr_dmabuf_unmap(struct gdr_dmabuf_pin *d)
{
	gdr_runs_drop(&d->pin);
	if (d->sgt)
		dma_buf_unmap_attachment(d->attachment, d->sgt, DMA_BIDIRECTIONAL);
	d->sgt = NULL;
}

static int gdr_dmabuf_prepare(struct gdr_pin *pin)
{
	struct gdr_dmabuf_pin *d = to_dmabuf(pin);
	struct sg_table *sgt;
	long waited;
	int ret;

	if (d->sgt)
		return 0;
	sgt = dma_buf_map_attachment(d->attachment, DMA_BIDIRECTIONAL);
	if (IS_ERR(sgt))
		return PTR_ERR(sgt);
	d->sgt = sgt;
	ret = gdr_dmabuf_read_table(d);
	if (!ret) {
		/* The exporter may still be copying to the new place. */
		waited = dma_resv_wait_timeout(d->dmabuf->resv, GDR_RESV_KERNEL, true, MAX_SCHEDULE_TIMEOUT);
		ret = waited < 0 ? waited : 0;
	}
	if (ret)
		gdr_dmabuf_unmap(d);
	return ret;
}

/* Called with the reservation lock held. */
static void gdr_dmabuf_moved(struct dma_buf_attachment *attachment)
{
	struct gdr_dmabuf_pin *d = attachment->importer_priv;

	gdr_pin_zap(&d->pin);
	gdr_dmabuf_unmap(d);
	atomic64_inc(&gdr_stats.moved);
}

static const struct dma_buf_attach_ops gdr_attach_ops = {
	.allow_peer2peer = true,
	.gdr_attach_moved = gdr_dmabuf_moved,
};

static void gdr_dmabuf_release(struct gdr_pin *pin)
{
	struct gdr_dmabuf_pin *d = to_dmabuf(pin);

	if (!d->attachment)
		return;
	gdr_dmabuf_lock(pin);
	gdr_dmabuf_unmap(d);
	gdr_dmabuf_unlock(pin);
	dma_buf_detach(d->dmabuf, d->attachment);
	atomic64_dec(&gdr_stats.dmabufs);
}

static void gdr_dmabuf_free(struct gdr_pin *pin)
{
	dma_buf_put(to_dmabuf(pin)->dmabuf);
	kfree(to_dmabuf(pin));
}

static const struct gdr_source gdr_dmabuf_source = {
	.cached_ram = true,
	.lock = gdr_dmabuf_lock,
	.lock_killable = gdr_dmabuf_lock_killable,
	.unlock = gdr_dmabuf_unlock,
	.prepare = gdr_dmabuf_prepare,
	.release = gdr_dmabuf_release,
	.free = gdr_dmabuf_free,
};

static int gdr_dmabuf_attach(struct gdr_dmabuf_pin *d)
{
	struct dma_buf_attachment *attachment;
	int ret;

	attachment = dma_buf_dynamic_attach(d->dmabuf, gdr_importer(), &gdr_attach_ops, d);
	if (IS_ERR(attachment))
		return PTR_ERR(attachment);
	d->attachment = attachment;
	atomic64_inc(&gdr_stats.dmabufs);
	/* What cannot be mapped is refused now rather than by a SIGBUS. */
	ret = dma_resv_lock_interruptible(d->dmabuf->resv, NULL);
	if (ret)
		return ret;
	ret = gdr_dmabuf_prepare(&d->pin);
	dma_resv_unlock(d->dmabuf->resv);
	return ret;
}

int gdr_dmabuf_pin(struct gdr_file *file, int fd, u64 offset, u64 size, u64 *handle)
{
	struct gdr_dmabuf_pin *d;
	u64 end, start = get_cycles();
	int ret;

	if (!gdr_importer())
		return -EOPNOTSUPP;
	if (!size || !PAGE_ALIGNED(offset) || !PAGE_ALIGNED(size) || check_add_overflow(offset, size, &end))
		return -EINVAL;
	d = kzalloc(sizeof(*d), GFP_KERNEL_ACCOUNT);
	if (!d)
		return -ENOMEM;
	d->dmabuf = dma_buf_get(fd);
	if (IS_ERR(d->dmabuf)) {
		ret = PTR_ERR(d->dmabuf);
		kfree(d);
		return ret;
	}
	d->offset = offset;
	ret = -EINVAL;
	if (end > d->dmabuf->size)
		goto out;
	/* A descriptor that cannot be written gives no mapping that can. */
	ret = -EACCES;
	if (!(d->dmabuf->file->f_mode & FMODE_WRITE))
		goto out;
	ret = gdr_pin_init(&d->pin, file, &gdr_dmabuf_source, size);
	if (ret)
		goto out;
	d->pin.va = offset;
	d->pin.page_size = PAGE_SIZE;
	ret = gdr_dmabuf_attach(d);
	d->pin.cycles = get_cycles() - start;
	*handle = d->pin.handle;
	ret = ret ?: gdr_pin_publish(&d->pin);
	if (ret)
		gdr_pin_destroy(&d->pin);
	return ret == -EINTR || ret == -ERESTARTSYS ? -ERESTARTSYS : gdr_errno(ret);

out:
	dma_buf_put(d->dmabuf);
	kfree(d);
	return ret;
}
