// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* The interface of NVIDIA's driver, over the objects that are shown. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/wait.h>

#include "../../src/nvp2p.h"
#include "provider.h"

/* A page table and who has it. */
struct held {
	struct list_head link;
	struct nvidia_p2p_page_table *table;
	struct nvidia_p2p_page *pages;
	struct object **objects; /* by page */
	u64 va, len;
	bool persistent;
	bool kept; /* after put_pages: nobody else will */
	bool table_freed;
	struct pid *owner;
	void (*freed)(void *data);
	void *data;
};

/* Ranges, and tables by state; no foreign code is called with this held. */
static DEFINE_MUTEX(p2p_lock);
static LIST_HEAD(ranges);
static LIST_HEAD(live);
static LIST_HEAD(dying); /* their callback runs */
static DECLARE_WAIT_QUEUE_HEAD(died);

static struct shown *range_find(struct pid *owner, u64 va)
{
	struct shown *range;

	list_for_each_entry(range, &ranges, link)
		if (range->owner == owner && va >= range->va && va - range->va < range->len)
			return range;
	return NULL;
}

int range_show(struct object *object, u64 va, u64 offset, u64 len)
{
	struct shown *range;
	u64 at;

	if ((va | offset | len) % CHUNK || !len || offset > object->size || len > object->size - offset)
		return -EINVAL;
	range = kzalloc(sizeof(*range), GFP_KERNEL);
	if (!range)
		return -ENOMEM;
	mutex_lock(&p2p_lock);
	for (at = va; at < va + len; at += CHUNK) {
		if (range_find(task_tgid(current), at)) {
			mutex_unlock(&p2p_lock);
			kfree(range);
			return -EEXIST;
		}
	}
	range->owner = get_pid(task_tgid(current));
	range->object = object;
	range->va = va;
	range->offset = offset;
	range->len = len;
	list_add(&range->link, &ranges);
	mutex_unlock(&p2p_lock);
	return 0;
}

static void held_free(struct held *held)
{
	u64 i;

	for (i = 0; i < held->len / CHUNK; i++) {
		if (held->objects && held->objects[i]) {
			atomic_dec(&held->objects[i]->tables);
			object_put(held->objects[i]);
		}
	}
	if (!held->table_freed) {
		kvfree(held->table->pages);
		kfree(held->table);
	}
	put_pid(held->owner);
	kvfree(held->objects);
	kvfree(held->pages);
	kfree(held);
	atomic64_dec(&counters.tables);
}

static struct held *held_find(struct list_head *list, const struct nvidia_p2p_page_table *table)
{
	struct held *held;

	list_for_each_entry(held, list, link)
		if (held->table == table)
			return held;
	return NULL;
}

/* A table of a range that is gone; with the lock held. */
static struct held *held_doomed(const struct shown *range)
{
	struct held *held;

	list_for_each_entry(held, &live, link)
		if (!held->persistent && held->owner == range->owner && held->va < range->va + range->len &&
		    range->va < held->va + held->len)
			return held;
	return NULL;
}

/* Calls back for every table of the range, one after the other, and waits, as a free of the memory does. */
static void range_free(struct shown *range)
{
	struct held *held;

	mutex_lock(&p2p_lock);
	while ((held = held_doomed(range))) {
		list_move(&held->link, &dying);
		mutex_unlock(&p2p_lock);
		atomic64_inc(&counters.callbacks);
		held->freed(held->data);
		mutex_lock(&p2p_lock);
		list_del(&held->link);
		atomic64_dec(&counters.pins);
		if (!held->table_freed)
			atomic64_inc(&counters.misuse);
		held_free(held);
		wake_up_all(&died);
	}
	mutex_unlock(&p2p_lock);
	put_pid(range->owner);
	kfree(range);
}

int range_hide(struct object *object, u64 va)
{
	struct shown *range;

	mutex_lock(&p2p_lock);
	range = range_find(task_tgid(current), va);
	if (!range || range->va != va || range->object != object) {
		mutex_unlock(&p2p_lock);
		return -EINVAL;
	}
	list_del(&range->link);
	mutex_unlock(&p2p_lock);
	range_free(range);
	return 0;
}

/* The owner has closed the object, maybe by exiting. */
void range_hide_all(struct object *object)
{
	struct shown *range, *next;
	LIST_HEAD(gone);

	mutex_lock(&p2p_lock);
	list_for_each_entry_safe(range, next, &ranges, link)
		if (range->object == object)
			list_move(&range->link, &gone);
	mutex_unlock(&p2p_lock);
	list_for_each_entry_safe(range, next, &gone, link)
		range_free(range);
}

static void table_spoil(struct held *held)
{
	struct nvidia_p2p_page_table *table = held->table;

	if (fault(PROVIDER_FAULT_VERSION))
		table->version = fault(PROVIDER_FAULT_VERSION);
	if (fault(PROVIDER_FAULT_PAGE_SIZE))
		table->page_size = fault(PROVIDER_FAULT_PAGE_SIZE) - 1;
	table->entries -= fault(PROVIDER_FAULT_ENTRIES);
	if (fault(PROVIDER_FAULT_MISALIGNED))
		held->pages[0].physical_address += PAGE_SIZE;
	if (fault(PROVIDER_FAULT_CACHEABLE))
		table->flags = NVP2P_TABLE_CACHEABLE;
}

static struct held *held_alloc(u64 va, u64 len)
{
	struct held *held = kzalloc(sizeof(*held), GFP_KERNEL);
	u64 count = len / CHUNK;

	if (!held)
		return NULL;
	held->table = kzalloc(sizeof(*held->table), GFP_KERNEL);
	if (!held->table) {
		kfree(held);
		return NULL;
	}
	atomic64_inc(&counters.tables);
	held->va = va;
	held->len = len;
	held->owner = get_pid(task_tgid(current));
	held->pages = kvcalloc(count, sizeof(*held->pages), GFP_KERNEL);
	held->objects = kvcalloc(count, sizeof(*held->objects), GFP_KERNEL);
	held->table->pages = kvcalloc(count, sizeof(*held->table->pages), GFP_KERNEL);
	if (held->pages && held->objects && held->table->pages)
		return held;
	held_free(held);
	return NULL;
}

/* Finds the chunks; with the lock held. */
static int held_fill(struct held *held)
{
	u64 i, count = held->len / CHUNK;

	for (i = 0; i < count; i++) {
		u64 va = held->va + i * CHUNK;
		struct shown *range = range_find(held->owner, va);

		if (!range)
			return -EINVAL;
		kref_get(&range->object->ref);
		atomic_inc(&range->object->tables);
		held->objects[i] = range->object;
		held->pages[i].physical_address =
			range->object->chunks[(range->offset + va - range->va) / CHUNK].phys;
		held->table->pages[i] = &held->pages[i];
	}
	held->table->version = 0x00020000;
	held->table->page_size = NVP2P_PAGE_64K;
	held->table->entries = count;
	table_spoil(held);
	return 0;
}

static int held_new(u64 va, u64 len, struct nvidia_p2p_page_table **table, void (*freed)(void *data), void *data,
		    bool persistent)
{
	struct held *held;
	int ret;

	if (fault(PROVIDER_FAULT_GET))
		return -fault(PROVIDER_FAULT_GET);
	if (va % CHUNK || len % CHUNK || !len || len > SZ_1G) {
		atomic64_add(va % CHUNK || len % CHUNK || !len || len / CHUNK > U32_MAX, &counters.misuse);
		return -EINVAL;
	}
	held = held_alloc(va, len);
	if (!held)
		return -ENOMEM;
	held->persistent = persistent;
	held->freed = freed;
	held->data = data;
	/* Before a callback can come, as the caller must wait for this. */
	*table = held->table;
	mutex_lock(&p2p_lock);
	ret = held_fill(held);
	if (ret || fault(PROVIDER_FAULT_NO_TABLE)) {
		mutex_unlock(&p2p_lock);
		*table = NULL;
		held_free(held);
		return ret;
	}
	list_add(&held->link, &live);
	atomic64_inc(&counters.pins);
	mutex_unlock(&p2p_lock);
	if (fault(PROVIDER_FAULT_DELAY))
		msleep(fault(PROVIDER_FAULT_DELAY));
	return 0;
}

/* While a callback runs, its end is waited for; afterwards the table is unknown, which is no error. */
static int held_put(struct nvidia_p2p_page_table *table, u64 va, bool persistent)
{
	struct held *held;

	mutex_lock(&p2p_lock);
	held = held_find(&live, table);
	if (held && fault(PROVIDER_FAULT_PUT)) {
		held->kept = persistent;
		mutex_unlock(&p2p_lock);
		return -fault(PROVIDER_FAULT_PUT);
	}
	if (held) {
		if (held->persistent != persistent || held->va != va)
			atomic64_inc(&counters.misuse);
		list_del(&held->link);
		atomic64_dec(&counters.pins);
		held_free(held);
	}
	while (!held && held_find(&dying, table)) {
		mutex_unlock(&p2p_lock);
		wait_event(died, !held_find(&dying, table));
		mutex_lock(&p2p_lock);
	}
	mutex_unlock(&p2p_lock);
	return 0;
}

void held_end_kept(void)
{
	struct held *held, *next;

	mutex_lock(&p2p_lock);
	list_for_each_entry_safe(held, next, &live, link) {
		if (!held->kept)
			continue;
		list_del(&held->link);
		atomic64_dec(&counters.pins);
		held_free(held);
	}
	mutex_unlock(&p2p_lock);
}

int nvidia_p2p_get_pages(u64 token, u32 va_space, u64 va, u64 len, struct nvidia_p2p_page_table **table,
			 void (*freed)(void *data), void *data)
{
	if (!freed) {
		atomic64_inc(&counters.misuse);
		return -EINVAL;
	}
	return held_new(va, len, table, freed, data, false);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages);

int nvidia_p2p_put_pages(u64 token, u32 va_space, u64 va, struct nvidia_p2p_page_table *table)
{
	return held_put(table, va, false);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages);

/* For callbacks alone. */
int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *table)
{
	struct held *held;

	mutex_lock(&p2p_lock);
	held = held_find(&dying, table);
	if (!held || held->table_freed) {
		atomic64_inc(&counters.misuse);
	} else {
		held->table_freed = true;
		kvfree(table->pages);
		kfree(table);
	}
	mutex_unlock(&p2p_lock);
	return 0;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_free_page_table);

#ifndef PROVIDER_OLD
int nvidia_p2p_get_pages_persistent(u64 va, u64 len, struct nvidia_p2p_page_table **table, u32 flags)
{
	if (flags & ~NVP2P_FORCE_BAR1) {
		atomic64_inc(&counters.misuse);
		return -EINVAL;
	}
	return held_new(va, len, table, NULL, NULL, true);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages_persistent);

int nvidia_p2p_put_pages_persistent(u64 va, struct nvidia_p2p_page_table *table, u32 flags)
{
	return held_put(table, va, true);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages_persistent);
#endif
