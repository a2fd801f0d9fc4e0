/* Prints the versions of the interfaces. Needs no GPU and no device. */

#include <stdio.h>

#include <gdasync.h>
#include <gdrapi.h>
#include <gdsync.h>
#define MP_NO_MPI
#include <mp.h>

int main(void)
{
    int major, minor, gds, mp;
    gdr_runtime_get_version(&major, &minor);
    if (gds_query_param(GDS_PARAM_VERSION, &gds) || mp_query_param(MP_PARAM_VERSION, &mp))
        return 1;
    printf("gdrapi %d.%d gdsync %d.%d mp %d.%d ", major, minor, gds >> 16, gds & 0xffff, mp >> 16, mp & 0xffff);
    printf("gdasync %u.%u\n", (unsigned)(gda_version() >> 16), (unsigned)(gda_version() & 0xffff));
    return 0;
}
