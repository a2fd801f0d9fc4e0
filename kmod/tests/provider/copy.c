// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* The GPU's own copy to where a dma-buf has moved: a fence that importers wait for before they let anybody in. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-fence.h>
#include <linux/slab.h>

#include "provider.h"

static DEFINE_SPINLOCK(fence_lock);
static DEFINE_MUTEX(copy_lock);
static struct dma_fence *copying;

static const char *copy_name(struct dma_fence *fence)
{
	return "gdr_provider";
}

static const struct dma_fence_ops copy_ops = {
	.get_driver_name = copy_name,
	.get_timeline_name = copy_name,
};

/* With the reservation lock held. There is one copy at a time: later moves wait for the same fence. */
int copy_begin(struct dma_resv *resv)
{
	int ret;

	ret = dma_resv_reserve_fences(resv, 1);
	if (ret)
		return ret;
	mutex_lock(&copy_lock);
	if (!copying) {
		copying = kzalloc(sizeof(*copying), GFP_KERNEL);
		if (copying)
			dma_fence_init(copying, &copy_ops, &fence_lock, dma_fence_context_alloc(1), 1);
	}
	if (copying)
		dma_resv_add_fence(resv, copying, DMA_RESV_USAGE_KERNEL);
	ret = copying ? 0 : -ENOMEM;
	mutex_unlock(&copy_lock);
	return ret;
}

void copy_end(void)
{
	struct dma_fence *fence;

	mutex_lock(&copy_lock);
	fence = copying;
	copying = NULL;
	mutex_unlock(&copy_lock);
	if (fence) {
		dma_fence_signal(fence);
		dma_fence_put(fence);
	}
}
