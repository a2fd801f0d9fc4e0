// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* By the name of the module that GDRCopy is built with. */
#define STUB_EXPORT EXPORT_SYMBOL_GPL
#include "stub.c"
