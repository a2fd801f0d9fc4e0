/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* What differs between kernels. Kbuild looks for what distributions back-port. */
#ifndef GDR_COMPAT_H
#define GDR_COMPAT_H

#include <linux/mm.h>
#include <linux/module.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(5, 16, 0)
#error "this module needs Linux 5.16 or newer"
#endif

/* 6.3 made vm_flags read-only. */
#ifdef GDR_HAVE_VM_FLAGS_SET
#define gdr_vm_flags_set(vma, flags) vm_flags_set(vma, flags)
#define gdr_vm_flags_clear(vma, flags) vm_flags_clear(vma, flags)
#else
#define gdr_vm_flags_set(vma, flags) ((vma)->vm_flags |= (flags))
#define gdr_vm_flags_clear(vma, flags) ((vma)->vm_flags &= ~(flags))
#endif

/* 6.13 wants a string. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
#define GDR_IMPORT_NS(ns) MODULE_IMPORT_NS(#ns)
#else
#define GDR_IMPORT_NS(ns) MODULE_IMPORT_NS(ns)
#endif

/* 6.2 passes a constant device. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define GDR_DEVNODE_CONST const
#else
#define GDR_DEVNODE_CONST
#endif

/* 6.0 and newer name what a fence waits for. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(5, 19, 0)
#define GDR_RESV_KERNEL DMA_RESV_USAGE_KERNEL
#else
#define GDR_RESV_KERNEL false
#endif

/* Renamed once, both ends. */
#ifdef GDR_HAVE_INVALIDATE_MAPPINGS
#define gdr_attach_moved invalidate_mappings
#define gdr_dma_buf_moved dma_buf_invalidate_mappings
#else
#define gdr_attach_moved move_notify
#define gdr_dma_buf_moved dma_buf_move_notify
#endif

#endif
