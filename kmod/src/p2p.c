// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* Pages from the GPU driver: kept until unpin (persistent), or until the memory is freed. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/overflow.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/timex.h>

#include "gdr.h"
#include "p2p_api.h"

struct gdr_p2p_pin {
	struct gdr_pin pin;
	struct mutex lock; /* the pin's source's */
	struct gdr_p2p_api api;
	struct gdr_p2p_request request;
	struct nvidia_p2p_page_table *table;
	bool persistent;
	/* Pages are counted as outstanding. */
	bool counted;
	/* The driver did not take the pages back: its callback ends what gdr_p2p_release() could not. */
	bool kept;
	/* The request has come back from the driver, with a table or without. */
	struct completion settled;
	/* The driver's callback is through with this structure. */
	struct completion freed;
};

static struct gdr_p2p_pin *to_p2p(struct gdr_pin *pin)
{
	return container_of(pin, struct gdr_p2p_pin, pin);
}

static void gdr_p2p_lock(struct gdr_pin *pin)
{
	mutex_lock(&to_p2p(pin)->lock);
}

static int gdr_p2p_lock_killable(struct gdr_pin *pin)
{
	return mutex_lock_killable(&to_p2p(pin)->lock);
}

static void gdr_p2p_unlock(struct gdr_pin *pin)
{
	mutex_unlock(&to_p2p(pin)->lock);
}

static int gdr_p2p_prepare(struct gdr_pin *pin)
{
	return 0;
}

static void gdr_p2p_uncount(struct gdr_p2p_pin *p2p)
{
	if (p2p->counted) {
		p2p->counted = false;
		atomic64_dec(&gdr_stats.get_pages);
	}
}

/*
 * Called by the driver, in whatever process frees the memory, maybe before nvidia_p2p_get_pages() has returned. The
 * table is the callee's to free.
 */
static void gdr_p2p_freed(void *data)
{
	struct gdr_p2p_pin *p2p = data;
	bool kept;

	wait_for_completion(&p2p->settled);
	mutex_lock(&p2p->lock);
	gdr_pin_revoke_locked(&p2p->pin);
	gdr_p2p_uncount(p2p);
	kept = p2p->kept;
	mutex_unlock(&p2p->lock);
	p2p->api.free_page_table(p2p->table);
	if (kept) {
		gdr_p2p_api_put(&p2p->api);
		gdr_pin_put(&p2p->pin);
		module_put(THIS_MODULE);
		return;
	}
	/* The pin may be gone once this is seen. */
	complete(&p2p->freed);
}

/*
 * While a callback runs, the driver lets nvidia_p2p_put_pages() wait for its end; afterwards it knows nothing of the
 * pages. What happens once, and in which order, is not left to that: pages that are known to be freed are not put. A
 * driver that refuses to take pages back still has the callback and its argument.
 */
static void gdr_p2p_release(struct gdr_pin *pin)
{
	struct gdr_p2p_pin *p2p = to_p2p(pin);
	struct gdr_p2p_request *r = &p2p->request;
	bool revoked;
	int ret = 0;

	if (!p2p->table)
		goto out;
	mutex_lock(&p2p->lock);
	revoked = pin->revoked;
	mutex_unlock(&p2p->lock);
	if (p2p->persistent)
		ret = p2p->api.put_persistent(r->addr, p2p->table, 0);
	else if (!revoked)
		ret = p2p->api.put_pages(r->token, r->va_space, r->addr, p2p->table);
	if (ret)
		pr_warn_ratelimited("the driver did not take back %llu bytes at %#llx (%d)\n", r->size, r->addr, ret);
	mutex_lock(&p2p->lock);
	revoked = pin->revoked;
	p2p->kept = ret && !p2p->persistent && !revoked;
	if (p2p->kept) {
		kref_get(&pin->ref);
		__module_get(THIS_MODULE);
		mutex_unlock(&p2p->lock);
		return;
	}
	gdr_p2p_uncount(p2p);
	mutex_unlock(&p2p->lock);
	if (revoked)
		wait_for_completion(&p2p->freed);
out:
	gdr_p2p_api_put(&p2p->api);
}

static void gdr_p2p_free(struct gdr_pin *pin)
{
	kfree(to_p2p(pin));
}

static const struct gdr_source gdr_p2p_source = {
	.lock = gdr_p2p_lock,
	.lock_killable = gdr_p2p_lock_killable,
	.unlock = gdr_p2p_unlock,
	.prepare = gdr_p2p_prepare,
	.release = gdr_p2p_release,
	.free = gdr_p2p_free,
};

/* Takes over what the driver's table says, which is checked: a wrong address would be mapped for all to see. */
static int gdr_p2p_read_table(struct gdr_p2p_pin *p2p)
{
	const struct nvidia_p2p_page_table *table = p2p->table;
	struct gdr_pin *pin = &p2p->pin;
	u32 major = table->version >> 16;
	u64 i, next = 0, pages = pin->size >> GDR_GPU_PAGE_SHIFT;
	size_t runs = 0;
	bool cacheable;
	int ret;

	if (major < 1 || major > 2) {
		pr_warn_ratelimited("the driver's page table has version %#x\n", table->version);
		return -EFAULT;
	}
	if (table->page_size != NVP2P_PAGE_64K) {
		pr_warn_ratelimited("the GPU's pages are not of 64 KiB (%u)\n", table->page_size);
		return -EINVAL;
	}
	if (table->entries != pages) {
		pr_warn_ratelimited("%u pages of the GPU for %llu\n", table->entries, pages);
		return -EIO;
	}
	for (i = 0; i < pages; i++) {
		u64 phys = table->pages[i]->physical_address;

		if (!IS_ALIGNED(phys, GDR_GPU_PAGE_SIZE))
			return -EIO;
		runs += !i || phys != next;
		next = phys + GDR_GPU_PAGE_SIZE;
	}
	ret = gdr_runs_alloc(pin, runs);
	if (ret)
		return ret;
	for (i = 0; i < pages; i++)
		gdr_runs_add(pin, table->pages[i]->physical_address, GDR_GPU_PAGE_SIZE);
	cacheable = table->version >= NVP2P_TABLE_HAS_FLAGS && (table->flags & NVP2P_TABLE_CACHEABLE);
	return gdr_runs_done(pin, cacheable);
}

static int gdr_p2p_get_pages(struct gdr_p2p_pin *p2p)
{
	struct gdr_p2p_request *r = &p2p->request;
	struct gdr_pin *pin = &p2p->pin;
	u64 start = get_cycles();
	int ret;

	if (p2p->persistent)
		ret = p2p->api.get_persistent(r->addr, r->size, &p2p->table, r->flags);
	else
		ret = p2p->api.get_pages(r->token, r->va_space, r->addr, r->size, &p2p->table, gdr_p2p_freed, p2p);
	pin->cycles = get_cycles() - start;
	if (!ret && !p2p->table)
		ret = -EIO;
	if (ret) {
		p2p->table = NULL;
		gdr_say("the driver refuses %llu bytes at %#llx (%d)\n", r->size, r->addr, ret);
		return gdr_errno(ret);
	}
	/* The callback cannot have come this far. */
	p2p->counted = true;
	atomic64_inc(&gdr_stats.get_pages);
	return gdr_p2p_read_table(p2p);
}

static int gdr_p2p_check(const struct gdr_p2p_request *r, bool persistent)
{
	u64 end;

	if (!r->addr || !r->size || r->flags & ~GDRDRV_PIN_FORCE_PCIE)
		return -EINVAL;
	if (check_add_overflow(r->addr, r->size, &end) || end > GDR_GPU_PAGE_MASK)
		return -EINVAL;
	/* The driver counts pages in 32 bits, and takes memory for them before it looks at the range. */
	if (r->size >> GDR_GPU_PAGE_SHIFT >= U32_MAX)
		return -EINVAL;
	if (persistent && (r->token || r->va_space))
		return -EINVAL;
	if ((r->flags & GDRDRV_PIN_FORCE_PCIE) && !(persistent && gdr_force_pcie))
		return -EINVAL;
	return 0;
}

int gdr_p2p_pin(struct gdr_file *file, const struct gdr_p2p_request *request, u64 *handle)
{
	struct gdr_p2p_pin *p2p;
	u64 addr = request->addr & GDR_GPU_PAGE_MASK;
	int ret;

	p2p = kzalloc(sizeof(*p2p), GFP_KERNEL_ACCOUNT);
	if (!p2p)
		return -ENOMEM;
	mutex_init(&p2p->lock);
	init_completion(&p2p->settled);
	init_completion(&p2p->freed);
	ret = gdr_p2p_api_get(&p2p->api);
	/* What is wrong with the request is said before what is wrong with the machine. */
	p2p->persistent = gdr_use_persistent && (ret || p2p->api.get_persistent);
	ret = gdr_p2p_check(request, p2p->persistent) ?: ret;
	if (ret)
		goto out_api;
	p2p->request = *request;
	p2p->request.addr = addr;
	p2p->request.size = round_up(request->addr + request->size, GDR_GPU_PAGE_SIZE) - addr;
	ret = gdr_pin_init(&p2p->pin, file, &gdr_p2p_source, p2p->request.size);
	if (ret)
		goto out_api;
	p2p->pin.va = addr;
	p2p->pin.page_size = GDR_GPU_PAGE_SIZE;
	p2p->pin.unaligned = addr != request->addr;
	ret = gdr_p2p_get_pages(p2p);
	complete_all(&p2p->settled);
	*handle = p2p->pin.handle;
	ret = ret ?: gdr_pin_publish(&p2p->pin);
	if (ret)
		gdr_pin_destroy(&p2p->pin);
	return ret;

out_api:
	gdr_p2p_api_put(&p2p->api);
	kfree(p2p);
	return ret;
}

/* Pins outlive the freeing of their memory. */
bool gdr_p2p_persistent(void)
{
	struct gdr_p2p_api api;
	bool persistent;

	/* Before the driver is loaded, what it will do is what all current ones do. */
	if (!gdr_use_persistent || gdr_p2p_api_get(&api))
		return gdr_use_persistent;
	persistent = api.get_persistent;
	gdr_p2p_api_put(&api);
	return persistent;
}

int gdr_p2p_init(void)
{
	return gdr_p2p_api_init();
}

void gdr_p2p_exit(void)
{
	gdr_p2p_api_exit();
	/* A callback that has said that it is done may have a few instructions to go. */
	synchronize_rcu_tasks();
}
