"""Ranks that mpirun has started, by themselves and over a communicator of mpi4py. Skipped where one of them is missing."""

import importlib.util
import os
import shutil
import subprocess
import sys
import unittest

import numpy as np
from job import LONG

import gdasync

MPIRUN = shutil.which("mpirun")
# Of Open MPI 4 and 5: as root, and on fewer cores than ranks.
ANYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "GDSYNC_DEVICE": "soft0",
}


def ring(group):
    with gdasync.init(group, timeout=LONG) as comm:
        assert comm.size == 2, "mpirun was not recognized"
        if group is not None:
            assert (comm.rank, comm.size) == (group.Get_rank(), group.Get_size())
        got = np.zeros(3000)
        comm.sendrecv(np.full(3000, float(comm.rank)), 1 - comm.rank, got, 1 - comm.rank)
        assert (got == 1 - comm.rank).all()
        print("rank", comm.rank, "is done", flush=True)


@unittest.skipIf(MPIRUN is None, "no mpirun here")
class Mpi(unittest.TestCase):
    def mpirun(self, how):
        command = [MPIRUN, "-n", "2", sys.executable, __file__, how]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * LONG, env={**os.environ, **ANYWHERE})
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual(ran.stdout.count("is done"), 2, ran.stdout)

    def test_ranks_of_mpirun(self):
        self.mpirun("alone")

    @unittest.skipUnless(importlib.util.find_spec("mpi4py"), "no mpi4py here")
    def test_communicator_of_mpi4py(self):
        self.mpirun("mpi4py")


if __name__ == "__main__" and sys.argv[1:] in (["alone"], ["mpi4py"]):
    if sys.argv[1] == "alone":
        ring(None)
    else:
        from mpi4py import MPI

        ring(MPI.COMM_WORLD)
elif __name__ == "__main__":
    unittest.main()
