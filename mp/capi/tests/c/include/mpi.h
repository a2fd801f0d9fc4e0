/* What mp.h and comm.h use of MPI, to compile them where there is none. */

#ifndef MPI_H
#define MPI_H

typedef struct comm_of_mpi *MPI_Comm;
typedef int MPI_Datatype;
#define MPI_SUCCESS 0
#define MPI_BYTE 1

int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_size(MPI_Comm comm, int *size);
int MPI_Allgather(const void *mine, int len, MPI_Datatype type, void *all, int each, MPI_Datatype of_all, MPI_Comm comm);
int MPI_Barrier(MPI_Comm comm);
int MPI_Type_size(MPI_Datatype type, int *size);

#endif
