// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* Objects as dma-bufs that may move, and cannot be mapped by mmap. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/fcntl.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "../../src/compat.h"
#include "provider.h"

struct exported {
	struct list_head link;
	struct object *object;
	struct dma_buf *dmabuf;
	u64 offset, len;
};

/* NVIDIA's driver takes every importer for a PCI device, of which it reads the mask and looks for the bridges. */
static bool is_pci(struct device *dev)
{
	return dev_is_pci(dev) && to_pci_dev(dev)->dma_mask == *dev->dma_mask && !pci_upstream_bridge(to_pci_dev(dev));
}

static int exported_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attachment)
{
	atomic64_add(!is_pci(attachment->dev), &counters.misuse);
	if (fault(PROVIDER_FAULT_ATTACH))
		return -fault(PROVIDER_FAULT_ATTACH);
	if (!attachment->peer2peer)
		return -EOPNOTSUPP;
	atomic64_inc(&counters.attachments);
	return 0;
}

static void exported_detach(struct dma_buf *dmabuf, struct dma_buf_attachment *attachment)
{
	atomic64_dec(&counters.attachments);
}

/* Nothing moves by itself. */
static int exported_pin(struct dma_buf_attachment *attachment)
{
	return 0;
}

static void exported_unpin(struct dma_buf_attachment *attachment)
{
}

static void unmap_pieces(struct device *dev, struct sg_table *table, int count, enum dma_data_direction dir)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(table->sgl, sg, count, i) {
		if (sg_page(sg))
			dma_unmap_page(dev, sg_dma_address(sg), sg->length, dir);
		else
			dma_unmap_resource(dev, sg_dma_address(sg), sg->length, dir, 0);
	}
}

/* The part of a chunk that lies in the buffer. */
static dma_addr_t map_piece(struct device *dev, const struct exported *exported, u64 at, u64 len,
			    struct scatterlist *sg, enum dma_data_direction dir)
{
	const struct chunk *chunk = &exported->object->chunks[at / CHUNK];

	if (chunk->backing == PROVIDER_BAR) {
		sg_set_page(sg, NULL, len, 0);
		return dma_map_resource(dev, chunk->phys + at % CHUNK, len, dir, 0);
	}
	sg_set_page(sg, virt_to_page(chunk->cpu + at % CHUNK), len, 0);
	return dma_map_page(dev, sg_page(sg), 0, len, dir);
}

static struct sg_table *exported_map(struct dma_buf_attachment *attachment, enum dma_data_direction dir)
{
	struct exported *exported = attachment->dmabuf->priv;
	struct device *dev = attachment->dev;
	u64 at = exported->offset, end = exported->offset + exported->len;
	struct sg_table *table;
	struct scatterlist *sg;
	int i, ret;

	dma_resv_assert_held(attachment->dmabuf->resv);
	if (fault(PROVIDER_FAULT_MAP))
		return ERR_PTR(-fault(PROVIDER_FAULT_MAP));
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	ret = sg_alloc_table(table, DIV_ROUND_UP(end, CHUNK) - at / CHUNK, GFP_KERNEL);
	if (ret)
		goto out;
	for_each_sgtable_sg(table, sg, i) {
		u64 len = min(end - at, CHUNK - at % CHUNK);
		dma_addr_t addr = map_piece(dev, exported, at, len, sg, dir);

		if (dma_mapping_error(dev, addr)) {
			unmap_pieces(dev, table, i, dir);
			sg_free_table(table);
			ret = -EIO;
			goto out;
		}
		sg_dma_address(sg) = addr;
		sg_dma_len(sg) = len;
		at += len;
	}
	if (fault(PROVIDER_FAULT_TABLE_ODD))
		sg_dma_len(table->sgl) -= PAGE_SIZE / 2;
	atomic64_inc(&counters.dma_mappings);
	return table;

out:
	kfree(table);
	return ERR_PTR(ret);
}

static void exported_unmap(struct dma_buf_attachment *attachment, struct sg_table *table, enum dma_data_direction dir)
{
	dma_resv_assert_held(attachment->dmabuf->resv);
	unmap_pieces(attachment->dev, table, table->orig_nents, dir);
	sg_free_table(table);
	kfree(table);
	atomic64_dec(&counters.dma_mappings);
}

static void exported_release(struct dma_buf *dmabuf)
{
	struct exported *exported = dmabuf->priv;
	struct object *object = exported->object;

	dma_resv_lock(&object->resv, NULL);
	list_del(&exported->link);
	dma_resv_unlock(&object->resv);
	object_put(object);
	kfree(exported);
}

static const struct dma_buf_ops exported_ops = {
	.attach = exported_attach,
	.detach = exported_detach,
	.pin = exported_pin,
	.unpin = exported_unpin,
	.map_dma_buf = exported_map,
	.unmap_dma_buf = exported_unmap,
	.release = exported_release,
};

/* Gives a descriptor. */
int object_export(struct object *object, u64 offset, u64 len, bool read_only)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct exported *exported;
	struct dma_buf *dmabuf;
	int fd;

	if (!PAGE_ALIGNED(offset | len) || !len || offset > object->size || len > object->size - offset)
		return -EINVAL;
	exported = kzalloc(sizeof(*exported), GFP_KERNEL);
	if (!exported)
		return -ENOMEM;
	exported->object = object;
	exported->offset = offset;
	exported->len = len;
	INIT_LIST_HEAD(&exported->link);
	info.ops = &exported_ops;
	info.size = len;
	info.flags = read_only ? O_RDONLY : O_RDWR;
	info.resv = &object->resv;
	info.priv = exported;
	kref_get(&object->ref);
	dmabuf = dma_buf_export(&info);
	if (IS_ERR(dmabuf)) {
		object_put(object);
		kfree(exported);
		return PTR_ERR(dmabuf);
	}
	exported->dmabuf = dmabuf;
	dma_resv_lock(&object->resv, NULL);
	list_add(&exported->link, &object->dmabufs);
	dma_resv_unlock(&object->resv);
	fd = dma_buf_fd(dmabuf, O_CLOEXEC);
	if (fd < 0)
		dma_buf_put(dmabuf);
	return fd;
}

/* With the reservation lock held. */
void object_moved(struct object *object)
{
	struct exported *exported;

	list_for_each_entry(exported, &object->dmabufs, link)
		gdr_dma_buf_moved(exported->dmabuf);
}

GDR_IMPORT_NS(DMA_BUF);
