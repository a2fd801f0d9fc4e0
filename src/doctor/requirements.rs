//! What the GPUDirect techniques ask for: cards, GPUs, software, links. The checks judge by these tables, and
//! `docs/requirements.md` shows them.

use std::fmt;

/// A network card, by the PCI device number of its functions (vendor 0x15b3).
#[derive(Debug)]
pub(super) struct Card {
    pub(super) devices: &'static [u16],
    pub(super) name: &'static str,
    pub(super) links: Links,
    pub(super) use_here: CardUse,
}

/// What a card's ports can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Links {
    InfiniBand,
    Ethernet,
    Both,
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "RoCE",
            Self::Both => "InfiniBand, RoCE",
        })
    }
}

/// How a card is used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CardUse {
    /// It reads our rings, and GPUs may ring its doorbells.
    Direct,
    /// A thread posts to it.
    Proxy,
}

impl fmt::Display for CardUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Proxy => "proxy",
        })
    }
}

const fn mlx5(devices: &'static [u16], name: &'static str, links: Links) -> Card {
    Card { devices, name, links, use_here: CardUse::Direct }
}

/// Mellanox and NVIDIA cards; virtual functions come second. Checked against the tables of Linux's mlx4 and mlx5 drivers,
/// rdma-core 65 (`providers/mlx5/mlx5.c`) and pci.ids of 2026-08-22.
pub(super) const CARDS: &[Card] = &[
    Card {
        devices: &[0x1003, 0x1004, 0x1007],
        name: "ConnectX-3, ConnectX-3 Pro",
        links: Links::Both,
        use_here: CardUse::Proxy,
    },
    mlx5(&[0x1011, 0x1012], "Connect-IB", Links::InfiniBand),
    mlx5(&[0x1013, 0x1014], "ConnectX-4", Links::Both),
    mlx5(&[0x1015, 0x1016], "ConnectX-4 Lx", Links::Ethernet),
    mlx5(&[0x1017, 0x1018], "ConnectX-5", Links::Both),
    mlx5(&[0x1019, 0x101a], "ConnectX-5 Ex", Links::Both),
    mlx5(&[0x101b, 0x101c], "ConnectX-6", Links::Both),
    mlx5(&[0x101d], "ConnectX-6 Dx", Links::Ethernet),
    mlx5(&[0x101f], "ConnectX-6 Lx", Links::Ethernet),
    mlx5(&[0x101e], "virtual function of ConnectX-6 Dx or newer", Links::Both),
    mlx5(&[0x1021], "ConnectX-7", Links::Both),
    mlx5(&[0x1023], "ConnectX-8", Links::Both),
    mlx5(&[0x1025], "ConnectX-9", Links::Both),
    mlx5(&[0x1027, 0x2101], "ConnectX-10", Links::Both),
    mlx5(&[0xa2d2, 0xa2d3], "BlueField", Links::Both),
    mlx5(&[0xa2d6], "BlueField-2", Links::Both),
    mlx5(&[0xa2dc], "BlueField-3", Links::Both),
    mlx5(&[0xa2df], "BlueField-4", Links::Both),
];

pub(super) const MELLANOX: u16 = 0x15b3;

/// The card with this PCI device number.
pub(super) fn card(device: u16) -> Option<&'static Card> {
    CARDS.iter().find(|card| card.devices.contains(&device))
}

/// GPUs of one generation.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) name: &'static str,
    /// Compute capability, from and to.
    pub(super) compute: ((i32, i32), (i32, i32)),
    /// Streams can trigger sends and wait for them here.
    pub(super) triggers: bool,
    /// The open kernel modules, which export dma-bufs, drive it.
    pub(super) open_modules: bool,
}

pub(super) const GENERATIONS: &[Generation] = &[
    Generation { name: "Kepler", compute: ((3, 0), (3, 9)), triggers: false, open_modules: false },
    Generation { name: "Maxwell", compute: ((5, 0), (5, 9)), triggers: false, open_modules: false },
    Generation { name: "Pascal", compute: ((6, 0), (6, 9)), triggers: false, open_modules: false },
    Generation { name: "Volta", compute: ((7, 0), (7, 4)), triggers: true, open_modules: false },
    Generation { name: "Turing", compute: ((7, 5), (7, 9)), triggers: true, open_modules: true },
    Generation { name: "Ampere", compute: ((8, 0), (8, 8)), triggers: true, open_modules: true },
    Generation { name: "Ada", compute: ((8, 9), (8, 9)), triggers: true, open_modules: true },
    Generation { name: "Hopper", compute: ((9, 0), (9, 9)), triggers: true, open_modules: true },
    Generation { name: "Blackwell", compute: ((10, 0), (10, 6)), triggers: true, open_modules: true },
    Generation { name: "Rubin", compute: ((10, 7), (10, 9)), triggers: true, open_modules: true },
    Generation {
        name: "Blackwell (Thor, RTX, GB10)",
        compute: ((11, 0), (12, 9)),
        triggers: true,
        open_modules: true,
    },
];

pub(super) fn generation(compute: (i32, i32)) -> Option<&'static Generation> {
    GENERATIONS.iter().find(|one| (one.compute.0..=one.compute.1).contains(&compute))
}

/// A version of software, and what asks for it.
#[derive(Debug)]
pub(super) struct Software {
    pub(super) name: &'static str,
    pub(super) least: (u32, u32),
    pub(super) for_what: &'static str,
}

impl Software {
    pub(super) fn is_met(&self, version: (u32, u32)) -> bool {
        version >= self.least
    }

    /// The version for people. A minor number of 0 says nothing where releases are counted by one number.
    pub(super) fn least(&self) -> String {
        match self.least {
            (major, 0) if major >= 20 => major.to_string(),
            (major, minor) => format!("{major}.{minor}"),
        }
    }
}

pub(super) const DRIVER: Software = Software {
    name: "NVIDIA driver",
    least: (515, 0),
    for_what: "stream memory operations of version 2 (CUDA 11.7), which need no module option",
};
pub(super) const OPEN_MODULES: Software = Software {
    name: "NVIDIA open kernel modules",
    least: (515, 0),
    for_what: "GPU memory as dma-bufs: registration with RDMA devices without nvidia-peermem",
};
pub(super) const CUDA: Software =
    Software { name: "CUDA of the driver", least: (11, 7), for_what: "`cuStreamBatchMemOp_v2`, dma-bufs" };
pub(super) const KERNEL: Software =
    Software { name: "Linux", least: (5, 12), for_what: "registering dma-bufs with RDMA devices" };
pub(super) const LIBIBVERBS: Software =
    Software { name: "rdma-core (libibverbs)", least: (20, 0), for_what: "any RDMA device, by the proxy" };
pub(super) const LIBMLX5: Software = Software {
    name: "rdma-core (libmlx5)",
    least: (31, 0),
    for_what: "mlx5 cards that read our rings (direct verbs, DevX); virtual functions need 33",
};
pub(super) const DMA_BUF_MR: Software =
    Software { name: "rdma-core (dma-bufs)", least: (34, 0), for_what: "`ibv_reg_dmabuf_mr`" };
pub(super) const DMA_BUF_UMEM: Software = Software {
    name: "rdma-core (queues in GPU memory)",
    least: (43, 0),
    for_what: "`mlx5dv_devx_umem_reg_ex` with a dma-buf (`MLX5DV_UMEM_MASK_DMABUF`)",
};
pub(super) const DEDICATED_UAR: Software = Software {
    name: "rdma-core (doorbell registers)",
    least: (45, 0),
    for_what: "a register of its own for each queue pair in GPU memory; before, those of a process share one",
};
pub(super) const GDRDRV: Software = Software {
    name: "gdrdrv, where it is used",
    least: (2, 0),
    for_what: "mapping GPU memory by the kernel module",
};

/// All of them, in the order of the document.
#[cfg(test)]
pub(super) const SOFTWARE: &[&Software] = &[
    &DRIVER,
    &OPEN_MODULES,
    &CUDA,
    &KERNEL,
    &LIBIBVERBS,
    &LIBMLX5,
    &DMA_BUF_MR,
    &DMA_BUF_UMEM,
    &DEDICATED_UAR,
    &GDRDRV,
];

/// What packets travel over.
#[derive(Debug)]
pub(super) struct Transport {
    pub(super) name: &'static str,
    pub(super) needs: &'static str,
}

pub(super) const INFINIBAND: Transport = Transport { name: "InfiniBand", needs: "a subnet manager" };
pub(super) const ROCE_V2: Transport =
    Transport { name: "RoCE v2", needs: "an IP address of the network interface" };
pub(super) const ROCE_V1: Transport =
    Transport { name: "RoCE v1", needs: "both ends in one Ethernet segment" };
/// All of them, in the order of the document.
#[cfg(test)]
pub(super) const TRANSPORTS: &[&Transport] = &[&INFINIBAND, &ROCE_V2, &ROCE_V1];
