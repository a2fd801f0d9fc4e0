// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* How the CPU caches a mapping. */
#include <linux/pci.h>

#include "gdr.h"

/* BlueField-3's Arm cores reach a GPU through device memory only. */
static bool gdr_needs_device;

void __init gdr_type_init(void)
{
	static const struct pci_device_id bluefield3[] __initconst = {
		{ PCI_DEVICE(0x15b3, 0xa2da) },
		{ PCI_DEVICE(0x15b3, 0xa2db) },
		{ }
	};

	gdr_needs_device = IS_ENABLED(CONFIG_ARM64) && pci_dev_present(bluefield3);
}

/* Whether the pages can be mapped so. */
static bool gdr_type_fits(const struct gdr_pin *pin, u32 type)
{
	/* The PAT of x86 knows one type for a page of RAM, which is the kernel's. */
	bool cached_only = pin->ram && (IS_ENABLED(CONFIG_X86) || pin->source->cached_ram);

	switch (type) {
	case GDRDRV_MAPPING_WC:
		return !cached_only && !gdr_needs_device;
	case GDRDRV_MAPPING_CACHED:
		return pin->cacheable;
	case GDRDRV_MAPPING_DEVICE:
		return !cached_only && gdr_needs_device;
	default:
		return false;
	}
}

/* The type that a wish gets, or -EOPNOTSUPP. */
int gdr_type_choose(const struct gdr_pin *pin, u32 wish)
{
	if (wish != GDRDRV_MAPPING_NONE)
		return gdr_type_fits(pin, wish) ? (int)wish : -EOPNOTSUPP;
	if (pin->cacheable)
		return GDRDRV_MAPPING_CACHED;
	return gdr_needs_device ? GDRDRV_MAPPING_DEVICE : GDRDRV_MAPPING_WC;
}

/*
 * Whether a mapping keeps its type, now that its pages may be others: a dma-buf can move from the GPU to RAM. On x86
 * vmf_insert_pfn() puts the type of the page above that of the mapping.
 */
bool gdr_type_holds(const struct gdr_pin *pin)
{
	return IS_ENABLED(CONFIG_X86) || gdr_type_fits(pin, pin->type);
}

pgprot_t gdr_type_prot(u32 type, pgprot_t prot)
{
	/* What is behind PCIe does not take part in the encryption of memory. */
	switch (type) {
	case GDRDRV_MAPPING_WC:
		return pgprot_decrypted(pgprot_writecombine(prot));
	case GDRDRV_MAPPING_DEVICE:
		return pgprot_decrypted(pgprot_device(prot));
	default:
		return prot;
	}
}
