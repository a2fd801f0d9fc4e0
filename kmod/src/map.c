// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* Mappings: one for each pin, shared, whole, in the process that made the pin. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/pfn.h>
#include <linux/sched/signal.h>

#include "compat.h"
#include "gdr.h"

/* One fault fills the page tables of a whole aligned block of this size, as far as it is mapped. */
#define GDR_FAULT_BLOCK (2UL << 20)

static void gdr_vma_open(struct vm_area_struct *vma)
{
	struct gdr_pin *pin = vma->vm_private_data;

	kref_get(&pin->ref);
	atomic_inc(&pin->maps);
	atomic64_inc(&gdr_stats.mappings);
}

static void gdr_vma_close(struct vm_area_struct *vma)
{
	struct gdr_pin *pin = vma->vm_private_data;

	atomic64_dec(&gdr_stats.mappings);
	atomic_dec(&pin->maps);
	gdr_pin_put(pin);
}

/* Parts of a mapping can be neither unmapped nor given other permissions. */
static int gdr_vma_may_split(struct vm_area_struct *vma, unsigned long addr)
{
	return -EINVAL;
}

/* Nor can it move. */
static int gdr_vma_mremap(struct vm_area_struct *vma)
{
	return -EINVAL;
}

/*
 * A signal came first: it is served, and the access tried again. The kernel's own access would be tried for ever, so a
 * process that is to die gets none.
 */
static vm_fault_t gdr_interrupted(void)
{
	return fatal_signal_pending(current) ? VM_FAULT_SIGBUS : VM_FAULT_NOPAGE;
}

/* Maps the page of the fault, and what it can of those around it. */
static vm_fault_t gdr_insert_block(struct vm_fault *vmf, const struct gdr_pin *pin)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long fault = vmf->address & PAGE_MASK;
	unsigned long addr = max(fault & ~(GDR_FAULT_BLOCK - 1), vma->vm_start);
	unsigned long end = min((fault | (GDR_FAULT_BLOCK - 1)) + 1, vma->vm_end);
	const struct gdr_run *run;
	vm_fault_t ret;

	run = gdr_runs_find(pin, fault - vma->vm_start);
	if (!run)
		return VM_FAULT_SIGBUS;
	ret = vmf_insert_pfn(vma, fault, PHYS_PFN(run->phys + (fault - vma->vm_start - run->offset)));
	if (ret != VM_FAULT_NOPAGE)
		return ret;
	for (; addr < end; addr += PAGE_SIZE) {
		u64 offset = addr - vma->vm_start;

		if (offset < run->offset || offset - run->offset >= run->len)
			run = gdr_runs_find(pin, offset);
		if (!run || vmf_insert_pfn(vma, addr, PHYS_PFN(run->phys + (offset - run->offset))) != VM_FAULT_NOPAGE)
			break;
	}
	return VM_FAULT_NOPAGE;
}

static vm_fault_t gdr_vma_fault(struct vm_fault *vmf)
{
	struct gdr_pin *pin = vmf->vma->vm_private_data;
	vm_fault_t ret = VM_FAULT_SIGBUS;
	int err;

	atomic64_inc(&gdr_stats.faults);
	if (pin->source->lock_killable(pin))
		return gdr_interrupted();
	if (pin->gone || pin->revoked)
		goto out;
	err = pin->source->prepare(pin);
	if (err == -EINTR || err == -ERESTARTSYS)
		ret = gdr_interrupted();
	else if (err == -ENOMEM)
		ret = VM_FAULT_OOM;
	else if (!err && gdr_type_holds(pin))
		ret = gdr_insert_block(vmf, pin);
out:
	pin->source->unlock(pin);
	return ret;
}

static const struct vm_operations_struct gdr_vm_ops = {
	.open = gdr_vma_open,
	.close = gdr_vma_close,
	.may_split = gdr_vma_may_split,
	.mremap = gdr_vma_mremap,
	.fault = gdr_vma_fault,
};

static int gdr_map_pin(struct gdr_pin *pin, struct vm_area_struct *vma)
{
	int type;

	if (pin->unaligned || vma->vm_end - vma->vm_start > pin->size)
		return -EINVAL;
	pin->source->lock(pin);
	if (pin->gone || pin->revoked)
		type = -EINVAL;
	else
		type = gdr_type_choose(pin, pin->wish);
	if (type >= 0 && atomic_cmpxchg(&pin->maps, 0, 1) != 0)
		type = -EINVAL;
	if (type >= 0)
		WRITE_ONCE(pin->type, type);
	pin->source->unlock(pin);
	return type;
}

/* The first page's offset is the handle. Pages are mapped when they are touched: see gdr_pin_zap(). */
int gdr_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct gdr_file *file = filp->private_data;
	struct gdr_pin *pin;
	int type;

	if (!gdr_file_is_mine(file))
		return -EACCES;
	/* A private mapping would show copies. */
	if (!(vma->vm_flags & VM_MAYSHARE) || (vma->vm_flags & VM_EXEC))
		return -EINVAL;
	pin = gdr_pin_find(file, vma->vm_pgoff);
	if (!pin)
		return -EINVAL;
	type = gdr_map_pin(pin, vma);
	if (type < 0) {
		gdr_pin_put(pin);
		return type;
	}
	gdr_dbg("map handle %llu, %lu bytes, type %d\n", pin->handle, vma->vm_end - vma->vm_start, type);
	/* A forked child gets none of it, nor does a core dump; nothing can make it longer. */
	gdr_vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	gdr_vm_flags_clear(vma, VM_MAYEXEC);
	vma->vm_page_prot = gdr_type_prot(type, vma->vm_page_prot);
	vma->vm_private_data = pin;
	vma->vm_ops = &gdr_vm_ops;
	atomic64_inc(&gdr_stats.mappings);
	atomic64_inc(&gdr_stats.total_maps);
	return 0;
}
