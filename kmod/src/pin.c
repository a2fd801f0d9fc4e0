// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* Pins, whatever their pages come from. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/overflow.h>

#include "gdr.h"

/* mmap takes a signed offset in bytes. */
#define GDR_HANDLE_END ((u64)LLONG_MAX >> PAGE_SHIFT)

/* What the kernel's own ENOTSUPP should have been for user space. */
#define GDR_ENOTSUPP 524
/* From here on errors are the kernel's own. */
#define GDR_ERRNO_END 512

/* What another driver says, in numbers that user space knows. */
int gdr_errno(int ret)
{
	if (ret == -GDR_ENOTSUPP)
		return -EOPNOTSUPP;
	return ret <= 0 && ret > -GDR_ERRNO_END ? ret : -EIO;
}

/* A pin takes as many handles as it has host pages: they are its offsets for mmap. None is given out twice. */
static int gdr_handle_take(struct gdr_file *file, u64 size, u64 *handle)
{
	u64 pages = max_t(u64, size >> PAGE_SHIFT, 1);
	u64 end;
	int ret = 0;

	mutex_lock(&file->handle_lock);
	if (check_add_overflow(file->next_handle, pages, &end) || end > GDR_HANDLE_END) {
		ret = -ENOMEM;
	} else {
		*handle = file->next_handle;
		file->next_handle = end;
	}
	mutex_unlock(&file->handle_lock);
	return ret;
}

int gdr_pin_init(struct gdr_pin *pin, struct gdr_file *file, const struct gdr_source *source, u64 size)
{
	int ret;

	ret = gdr_handle_take(file, size, &pin->handle);
	if (ret)
		return ret;
	kref_init(&pin->ref);
	pin->file = file;
	pin->source = source;
	pin->size = size;
	return 0;
}

/* From here on other threads find the pin, and may unpin it. On failure it stays the caller's. */
int gdr_pin_publish(struct gdr_pin *pin)
{
	u64 size = pin->size;
	int ret;

	pin->published = true;
	ret = xa_err(xa_store(&pin->file->pins, pin->handle, pin, GFP_KERNEL_ACCOUNT));
	if (ret) {
		pin->published = false;
		return ret;
	}
	atomic64_inc(&gdr_stats.pins);
	atomic64_inc(&gdr_stats.total_pins);
	atomic64_add(size, &gdr_stats.bytes);
	return 0;
}

struct gdr_pin *gdr_pin_find(struct gdr_file *file, u64 handle)
{
	struct gdr_pin *pin;

	xa_lock(&file->pins);
	pin = xa_load(&file->pins, handle);
	if (pin)
		kref_get(&pin->ref);
	xa_unlock(&file->pins);
	return pin;
}

/* Of several callers one gets the pin, and with it the table's reference. */
struct gdr_pin *gdr_pin_take(struct gdr_file *file, u64 handle)
{
	return xa_erase(&file->pins, handle);
}

static void gdr_pin_free(struct kref *ref)
{
	struct gdr_pin *pin = container_of(ref, struct gdr_pin, ref);

	pin->source->free(pin);
}

void gdr_pin_put(struct gdr_pin *pin)
{
	kref_put(&pin->ref, gdr_pin_free);
}

/*
 * Takes the pages out of the page tables. All of the pin's range is covered, so it does not matter what became of the
 * VMA. Pages are mapped by faults under the same lock and never by mmap itself: what is mapped before its VMA can be
 * found in the address space would be missed here.
 */
void gdr_pin_zap(struct gdr_pin *pin)
{
	unmap_mapping_range(pin->file->inode->i_mapping, pin->handle << PAGE_SHIFT, pin->size, 1);
}

/* The memory is not the process's any more. What is unpinned is not mapped, and its file may be gone. */
void gdr_pin_revoke_locked(struct gdr_pin *pin)
{
	WRITE_ONCE(pin->revoked, true);
	if (!pin->gone)
		gdr_pin_zap(pin);
	gdr_runs_drop(pin);
	atomic64_inc(&gdr_stats.revoked);
}

/* Ends a pin that was taken from the table, or was never there. A VMA that is left gives SIGBUS. */
void gdr_pin_destroy(struct gdr_pin *pin)
{
	pin->source->lock(pin);
	pin->gone = true;
	gdr_pin_zap(pin);
	gdr_runs_drop(pin);
	pin->source->unlock(pin);
	pin->source->release(pin);
	if (pin->published) {
		atomic64_dec(&gdr_stats.pins);
		atomic64_sub(pin->size, &gdr_stats.bytes);
	}
	gdr_pin_put(pin);
}
