// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* A driver whose functions the kernel does not look up for others. */
#define STUB_EXPORT EXPORT_SYMBOL
#include "stub.c"
