// SPDX-License-Identifier: MIT OR GPL-2.0-only
/* A driver without persistent pins. */
#define PROVIDER_OLD
#include "p2p.c"
