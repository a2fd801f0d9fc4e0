// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* Memory of the made-up GPU: pages of the kernel, or the BAR of a PCI device. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/io.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "provider.h"

static struct pci_dev *bar_device;
static void __iomem *bar_cpu;
static phys_addr_t bar_phys;
static unsigned long bar_chunks;
static unsigned long *bar_used;
static DEFINE_MUTEX(bar_lock);

/* Without the device there is only RAM. */
int bar_init(void)
{
	struct pci_dev *dev = pci_get_device(0x1af4, 0x1110, NULL);

	if (!dev)
		return 0;
	if (pci_enable_device(dev)) {
		pci_dev_put(dev);
		return 0;
	}
	bar_device = dev;
	bar_phys = pci_resource_start(dev, 2);
	bar_chunks = pci_resource_len(dev, 2) / CHUNK;
	bar_cpu = ioremap_wc(bar_phys, bar_chunks * CHUNK);
	bar_used = bitmap_zalloc(bar_chunks, GFP_KERNEL);
	if (bar_cpu && bar_used && bar_chunks)
		return 0;
	bar_exit();
	return -ENOMEM;
}

void bar_exit(void)
{
	bitmap_free(bar_used);
	if (bar_cpu)
		iounmap(bar_cpu);
	if (bar_device) {
		pci_disable_device(bar_device);
		pci_dev_put(bar_device);
	}
}

static int chunk_alloc_bar(struct chunk *chunk)
{
	unsigned long index;

	mutex_lock(&bar_lock);
	index = bar_used ? find_first_zero_bit(bar_used, bar_chunks) : 0;
	if (index >= bar_chunks) {
		mutex_unlock(&bar_lock);
		return bar_used ? -ENOMEM : -ENODEV;
	}
	set_bit(index, bar_used);
	mutex_unlock(&bar_lock);
	chunk->phys = bar_phys + index * CHUNK;
	chunk->cpu = (void __force *)bar_cpu + index * CHUNK;
	memset_io((void __iomem *)chunk->cpu, 0, CHUNK);
	return 0;
}

static int chunk_alloc(struct chunk *chunk, u32 backing)
{
	int ret = 0;

	chunk->backing = backing;
	if (backing == PROVIDER_BAR) {
		ret = chunk_alloc_bar(chunk);
	} else {
		chunk->cpu = (void *)__get_free_pages(GFP_KERNEL | __GFP_ZERO | __GFP_COMP | __GFP_NOWARN,
						       get_order(CHUNK));
		if (!chunk->cpu)
			return -ENOMEM;
		chunk->phys = virt_to_phys(chunk->cpu);
	}
	if (!ret)
		atomic64_inc(&counters.chunks);
	return ret;
}

static void chunk_free(const struct chunk *chunk)
{
	/* Whoever still looks at it sees that it is not his any more. */
	if (chunk->backing == PROVIDER_BAR) {
		memset_io((void __iomem *)chunk->cpu, 0xee, CHUNK);
		mutex_lock(&bar_lock);
		clear_bit((chunk->phys - bar_phys) / CHUNK, bar_used);
		mutex_unlock(&bar_lock);
	} else {
		memset(chunk->cpu, 0xee, CHUNK);
		free_pages((unsigned long)chunk->cpu, get_order(CHUNK));
	}
	atomic64_dec(&counters.chunks);
}

static void chunks_free(struct chunk *chunks, u64 count)
{
	while (count--)
		chunk_free(&chunks[count]);
	kvfree(chunks);
}

static struct chunk *chunks_alloc(u64 count, u32 backing)
{
	struct chunk *chunks;
	u64 i;
	int ret;

	chunks = kvcalloc(count, sizeof(*chunks), GFP_KERNEL);
	if (!chunks)
		return ERR_PTR(-ENOMEM);
	for (i = 0; i < count; i++) {
		ret = chunk_alloc(&chunks[i], backing);
		if (ret) {
			chunks_free(chunks, i);
			return ERR_PTR(ret);
		}
	}
	return chunks;
}

struct object *object_new(u64 size, u32 backing)
{
	struct object *object;
	struct chunk *chunks;

	if (!size || size % CHUNK || size > SZ_1G || backing > PROVIDER_BAR)
		return ERR_PTR(-EINVAL);
	chunks = chunks_alloc(size / CHUNK, backing);
	if (IS_ERR(chunks))
		return ERR_CAST(chunks);
	object = kzalloc(sizeof(*object), GFP_KERNEL);
	if (!object) {
		chunks_free(chunks, size / CHUNK);
		return ERR_PTR(-ENOMEM);
	}
	kref_init(&object->ref);
	object->size = size;
	object->chunks = chunks;
	mutex_init(&object->lock);
	dma_resv_init(&object->resv);
	INIT_LIST_HEAD(&object->dmabufs);
	atomic64_inc(&counters.objects);
	return object;
}

static void object_free(struct kref *ref)
{
	struct object *object = container_of(ref, struct object, ref);

	chunks_free(object->chunks, object->size / CHUNK);
	dma_resv_fini(&object->resv);
	kfree(object);
	atomic64_dec(&counters.objects);
}

void object_put(struct object *object)
{
	kref_put(&object->ref, object_free);
}

static int chunk_copy(const struct chunk *chunk, size_t at, char __user *user, void *bounce, size_t len, bool write)
{
	if (write) {
		if (copy_from_user(bounce, user, len))
			return -EFAULT;
		if (chunk->backing == PROVIDER_BAR)
			memcpy_toio((void __iomem *)chunk->cpu + at, bounce, len);
		else
			memcpy(chunk->cpu + at, bounce, len);
		return 0;
	}
	if (chunk->backing == PROVIDER_BAR)
		memcpy_fromio(bounce, (void __iomem *)chunk->cpu + at, len);
	else
		memcpy(bounce, chunk->cpu + at, len);
	return copy_to_user(user, bounce, len) ? -EFAULT : 0;
}

int object_copy(struct object *object, u64 offset, char __user *user, size_t len, bool write)
{
	void *bounce;
	int ret = 0;

	if (offset > object->size || len > object->size - offset)
		return -EINVAL;
	bounce = kvmalloc(CHUNK, GFP_KERNEL);
	if (!bounce)
		return -ENOMEM;
	while (len && !ret) {
		size_t at = offset % CHUNK, part = min_t(size_t, len, CHUNK - at);

		mutex_lock(&object->lock);
		ret = chunk_copy(&object->chunks[offset / CHUNK], at, user, bounce, part, write);
		mutex_unlock(&object->lock);
		offset += part;
		user += part;
		len -= part;
	}
	kvfree(bounce);
	return ret;
}

int object_move(struct object *object, u32 backing)
{
	u64 i, count = object->size / CHUNK;
	struct chunk *chunks;
	void *bounce;
	int ret = 0;

	if (backing > PROVIDER_BAR)
		return -EINVAL;
	chunks = chunks_alloc(count, backing);
	if (IS_ERR(chunks))
		return PTR_ERR(chunks);
	bounce = kvmalloc(CHUNK, GFP_KERNEL);
	if (!bounce) {
		chunks_free(chunks, count);
		return -ENOMEM;
	}
	mutex_lock(&object->lock);
	dma_resv_lock(&object->resv, NULL);
	if (fault(PROVIDER_FAULT_COPYING))
		ret = copy_begin(&object->resv);
	if (ret)
		goto out;
	/* First nobody must write any more. */
	object_moved(object);
	for (i = 0; i < count; i++) {
		if (object->chunks[i].backing == PROVIDER_BAR)
			memcpy_fromio(bounce, (void __iomem *)object->chunks[i].cpu, CHUNK);
		else
			memcpy(bounce, object->chunks[i].cpu, CHUNK);
		if (backing == PROVIDER_BAR)
			memcpy_toio((void __iomem *)chunks[i].cpu, bounce, CHUNK);
		else
			memcpy(chunks[i].cpu, bounce, CHUNK);
	}
	swap(object->chunks, chunks);
out:
	dma_resv_unlock(&object->resv);
	mutex_unlock(&object->lock);
	kvfree(bounce);
	chunks_free(chunks, count);
	return ret;
}
