/* Opens a device, makes one object of each kind, ends all, and says what is left after many rounds. */
#include <dirent.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char page[8192] __attribute__((aligned(4096)));

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%s: %s\n", #what, strerror(errno)); exit(1); } } while (0)

static void cycle(struct ibv_device *device)
{
    struct ibv_context *context = ibv_open_device(device);
    CHECK(context);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(pd);
    struct ibv_mr *mr = ibv_reg_mr(pd, page, sizeof page, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(channel);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, channel, 0);
    CHECK(cq);
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp);
    /* What is used cannot go. */
    CHECK(ibv_dealloc_pd(pd) == EBUSY);
    CHECK(ibv_destroy_qp(qp) == 0);
    CHECK(ibv_destroy_cq(cq) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == 0);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0);
    CHECK(ibv_close_device(context) == 0);
}

static int descriptors(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static long resident(void)
{
    long pages[2] = { 0, 0 };
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld %ld", pages, pages + 1) == 2);
    fclose(file);
    return pages[1];
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1000;
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    for (int n = 0; n < rounds / 10; n++)
        cycle(list[0]);
    int fds = descriptors();
    long pages = resident();
    for (int n = 0; n < rounds; n++)
        cycle(list[0]);
    printf("descriptors %d pages %ld\n", descriptors() - fds, resident() - pages);
    /* A child has none of it, and can start anew. */
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context);
    fflush(stdout);
    if (fork() == 0) {
        errno = 0;
        CHECK(!ibv_alloc_pd(context) && errno == EIO);
        cycle(list[0]);
        printf("child\n");
        fflush(stdout);
        _exit(0);
    }
    /* A child of vfork shares the memory, and closes descriptors of its own. */
    if (vfork() == 0) {
        close(context->cmd_fd);
        _exit(0);
    }
    CHECK(ibv_alloc_pd(context));
    return 0;
}
