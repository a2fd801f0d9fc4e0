/* Sizes and offsets of the structures, and the version. */

#include <gdasync.h>
#include <stdio.h>

#define SIZE(type) printf("sizeof %s %zu\n", #type, sizeof(struct type))
#define OFFSET(type, field) printf("offsetof %s %s %zu\n", #type, #field, offsetof(struct type, field))

int main(void)
{
    SIZE(gda_config);
    OFFSET(gda_config, device);
    OFFSET(gda_config, max_pieces);
    SIZE(gda_info);
    OFFSET(gda_info, device);
    SIZE(gda_exchange);
    OFFSET(gda_exchange, self);
    OFFSET(gda_exchange, release);
    SIZE(gda_buf);
    OFFSET(gda_buf, len);
    SIZE(gda_status);
    OFFSET(gda_status, tag);
    SIZE(gda_signal);
    OFFSET(gda_signal, add);
    printf("GDA_VERSION %u\n", GDA_VERSION);
    printf("GDA_EXPORT_BYTES %d\n", GDA_EXPORT_BYTES);
    return 0;
}
