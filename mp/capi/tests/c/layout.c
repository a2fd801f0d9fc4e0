/* Sizes and places of mp.h's structures, for the test that compares them with the library's. */

#define MP_NO_MPI
#include <mp.h>
#include <stdio.h>

#define SIZE(type) printf("sizeof %s %zu\n", #type, sizeof(struct type))
#define PLACE(type, member) printf("offsetof %s %s %zu\n", #type, #member, offsetof(struct type, member))

int main(void)
{
    SIZE(mp_exchange);
    PLACE(mp_exchange, rank);
    PLACE(mp_exchange, self);
    PLACE(mp_exchange, allgather);
    PLACE(mp_exchange, release);
    SIZE(mp_word_words);
    PLACE(mp_word_words, value);
    SIZE(mp_send_words);
    PLACE(mp_send_words, db_ptr);
    PLACE(mp_send_words, dbrec_value);
    SIZE(mp_wait_words);
    PLACE(mp_wait_words, sema_value);
    PLACE(mp_wait_words, cond);
    printf("sizeof mp_request_t %zu\n", sizeof(mp_request_t));
    printf("MP_API_VERSION %d\n", MP_API_VERSION);
    return 0;
}
