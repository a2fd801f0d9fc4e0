// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* The physical pages of a pin, as few runs as possible. All of this happens under the lock of the pin's source. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/slab.h>

#include "gdr.h"

int gdr_runs_alloc(struct gdr_pin *pin, size_t most)
{
	pin->nr_runs = 0;
	pin->nr_reserved = 0;
	pin->runs = kvmalloc_array(most, sizeof(*pin->runs), GFP_KERNEL_ACCOUNT);
	return pin->runs ? 0 : -ENOMEM;
}

/* At most as many different runs as were allocated. */
void gdr_runs_add(struct gdr_pin *pin, phys_addr_t phys, u64 len)
{
	struct gdr_run *last = pin->nr_runs ? &pin->runs[pin->nr_runs - 1] : NULL;

	if (last && last->phys + last->len == phys) {
		last->len += len;
		return;
	}
	pin->runs[pin->nr_runs++] = (struct gdr_run) {
		.offset = last ? last->offset + last->len : 0,
		.len = len,
		.phys = phys,
	};
}

/*
 * RAM has its attributes in the kernel's own mapping of it; a mapping must not have others. The first page stands for its
 * run: no driver's allocation goes on from RAM into the addresses of a device, and a look at every page takes too long.
 */
static bool gdr_run_is_ram(const struct gdr_run *run)
{
	return page_is_ram(PHYS_PFN(run->phys));
}

/* On x86 vmf_insert_pfn() maps device memory uncached unless it is reserved with another type. */
static void gdr_runs_reserve(struct gdr_pin *pin)
{
	for (; pin->nr_reserved < pin->nr_runs; pin->nr_reserved++) {
		const struct gdr_run *run = &pin->runs[pin->nr_reserved];
		int ret = arch_io_reserve_memtype_wc(run->phys, run->len);

		if (ret) {
			pr_warn_ratelimited("%pa has another memory type than write-combining (%d): slow\n", &run->phys,
					    ret);
			return;
		}
	}
}

/* Looks at all runs; pages of two kinds in one mapping cannot have one type. */
int gdr_runs_done(struct gdr_pin *pin, bool cacheable)
{
	size_t i;

	if (!pin->nr_runs)
		return -EIO;
	pin->ram = gdr_run_is_ram(&pin->runs[0]);
	for (i = 1; i < pin->nr_runs; i++)
		if (gdr_run_is_ram(&pin->runs[i]) != pin->ram)
			return -EOPNOTSUPP;
	/* x86 cannot cache what is behind PCIe, whatever the driver says. */
	pin->cacheable = pin->ram || (cacheable && !IS_ENABLED(CONFIG_X86));
	if (!pin->cacheable)
		gdr_runs_reserve(pin);
	return 0;
}

/* The pages must be out of all page tables. */
void gdr_runs_drop(struct gdr_pin *pin)
{
	while (pin->nr_reserved) {
		const struct gdr_run *run = &pin->runs[--pin->nr_reserved];

		arch_io_free_memtype_wc(run->phys, run->len);
	}
	kvfree(pin->runs);
	pin->runs = NULL;
	pin->nr_runs = 0;
}

/* The run that holds a byte of the pin. */
const struct gdr_run *gdr_runs_find(const struct gdr_pin *pin, u64 offset)
{
	size_t low = 0, high = pin->nr_runs;

	while (low < high) {
		size_t mid = low + (high - low) / 2;
		const struct gdr_run *run = &pin->runs[mid];

		if (offset < run->offset)
			high = mid;
		else if (offset - run->offset >= run->len)
			low = mid + 1;
		else
			return run;
	}
	return NULL;
}
