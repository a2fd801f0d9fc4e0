// SPDX-License-Identifier: MIT OR GPL-2.0-only
/*
 * The device that dma-bufs are imported for.
 *
 * It is a PCI function, on a root bus, at a place where nothing is, and never added to the bus: it has no configuration
 * space, no driver and no IOMMU. Exporters take importers of peer memory for PCI devices. NVIDIA's driver does not even
 * ask: its check of the topology reads the pci_dev around the device that it is given. Others ask pci_p2pdma, which
 * knows no other devices.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cc_platform.h>
#include <linux/dma-mapping.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "gdr.h"

static struct pci_dev *gdr_pdev;

static void gdr_pdev_release(struct device *dev)
{
	struct pci_dev *pdev = to_pci_dev(dev);

	put_device(&pdev->bus->dev);
	kfree(pdev);
}

/* pci_p2pdma remembers devices by their place: it must not be another one's. */
static int gdr_free_devfn(struct pci_bus *bus)
{
	struct pci_dev *there;
	int devfn;

	for (devfn = 0xff; devfn >= 0; devfn--) {
		there = pci_get_slot(bus, devfn);
		if (!there)
			return devfn;
		pci_dev_put(there);
	}
	return -ENODEV;
}

static struct pci_dev *gdr_pdev_new(void)
{
	struct pci_bus *bus = pci_find_next_bus(NULL);
	int devfn = bus ? gdr_free_devfn(bus) : -ENODEV;
	struct pci_dev *pdev;

	if (devfn < 0)
		return NULL;
	pdev = pci_alloc_dev(bus);
	if (!pdev)
		return NULL;
	device_initialize(&pdev->dev);
	pdev->dev.release = gdr_pdev_release;
	pdev->dev.bus = &pci_bus_type;
	pdev->sysdata = bus->sysdata;
	pdev->devfn = devfn;
	pdev->error_state = pci_channel_io_normal;
	pdev->dma_mask = DMA_BIT_MASK(64);
	pdev->dev.dma_mask = &pdev->dma_mask;
	pdev->dev.coherent_dma_mask = DMA_BIT_MASK(64);
	pdev->dev.dma_parms = &pdev->dma_parms;
	dma_set_max_seg_size(&pdev->dev, UINT_MAX);
	if (dev_set_name(&pdev->dev, GDR_NAME)) {
		put_device(&pdev->dev);
		return NULL;
	}
	return pdev;
}

/* Whether the importer's DMA addresses are those of the CPU: no translation, no bounce buffers, no encryption. */
static bool gdr_importer_is_direct(struct device *dev)
{
	struct page *page;
	dma_addr_t addr;
	bool direct;

	if (device_iommu_mapped(dev) || cc_platform_has(CC_ATTR_MEM_ENCRYPT))
		return false;
	page = alloc_page(GFP_KERNEL);
	if (!page)
		return false;
	addr = dma_map_page(dev, page, 0, PAGE_SIZE, DMA_TO_DEVICE);
	direct = !dma_mapping_error(dev, addr) && addr == page_to_phys(page);
	if (!dma_mapping_error(dev, addr))
		dma_unmap_page(dev, addr, PAGE_SIZE, DMA_TO_DEVICE);
	__free_page(page);
	return direct;
}

struct device *gdr_importer(void)
{
	return gdr_pdev ? &gdr_pdev->dev : NULL;
}

/* Without an importer all else works. */
void gdr_importer_init(void)
{
	struct pci_dev *pdev;

	if (!gdr_dmabuf_enabled)
		return;
	pdev = gdr_pdev_new();
	if (!pdev) {
		pr_warn("no place on a PCI bus to import dma-bufs for\n");
		return;
	}
	if (!gdr_importer_is_direct(&pdev->dev)) {
		pr_info("DMA addresses are not CPU addresses here: no pins of dma-bufs\n");
		put_device(&pdev->dev);
		return;
	}
	gdr_pdev = pdev;
}

void gdr_importer_exit(void)
{
	if (gdr_pdev)
		put_device(&gdr_pdev->dev);
	gdr_pdev = NULL;
}
