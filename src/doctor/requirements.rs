//! What the GPUDirect techniques ask for: cards, GPUs, software, links. The checks judge by the tables of
//! `docs/requirements.md`.

use std::fmt::Display;

const DOCUMENT: &str = include_str!("../../docs/requirements.md");

/// The cells of each row of the table whose first column has this heading.
pub(super) fn rows<const COLUMNS: usize>(heading: &str) -> impl Iterator<Item = [&'static str; COLUMNS]> {
    let cells = |line: &'static str| -> Option<Vec<_>> {
        Some(line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect())
    };
    let table = DOCUMENT.lines().skip_while(move |line| cells(line).is_none_or(|cells| cells[0] != heading));
    // Behind the headings and the line below them.
    table.skip(2).map_while(move |line| cells(line)?.try_into().ok())
}

pub(super) fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((parts.next()?.ok()?, parts.next().and_then(Result::ok).unwrap_or(0)))
}

pub(super) const MELLANOX: u16 = 0x15b3;

#[derive(Clone, Copy, Debug)]
pub(super) struct Card {
    pub(super) name: &'static str,
    /// What its ports can be: `InfiniBand`, `RoCE` or both.
    pub(super) links: &'static str,
    /// It reads our rings, and GPUs may ring its doorbells; to others a thread posts.
    pub(super) is_direct: bool,
}

/// The card with this PCI device number (vendor [`MELLANOX`]).
pub(super) fn card(device: u16) -> Option<Card> {
    let is_it = |number: &str| u16::from_str_radix(number, 16) == Ok(device);
    let row = rows("card").find(|[_, numbers, _, _]| numbers.split(", ").any(is_it));
    row.map(|[name, _, links, used]| Card { name, links, is_direct: used == "direct" })
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Generation {
    pub(super) name: &'static str,
    /// Streams can trigger sends and wait for them here.
    pub(super) triggers: bool,
    /// The open kernel modules, which export dma-bufs, drive it.
    pub(super) open_modules: bool,
}

pub(super) fn generation(compute: (u32, u32)) -> Option<Generation> {
    let is_it = |range: &str| {
        let (from, to) = range.split_once(" to ")?;
        Some((numbers(from)?..=numbers(to)?).contains(&compute))
    };
    let row = rows("generation").find(|[_, range, _, _]| is_it(range) == Some(true));
    row.map(|[name, _, triggers, modules]| Generation {
        name,
        triggers: triggers == "yes",
        open_modules: modules == "yes",
    })
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Software {
    pub(super) name: &'static str,
}

impl Software {
    fn row(self) -> [&'static str; 3] {
        rows("software").find(|[name, _, _]| *name == self.name).unwrap_or([self.name, "", ""])
    }

    /// The oldest version that will do.
    pub(super) fn least(self) -> &'static str {
        self.row()[1]
    }

    /// What asks for it.
    pub(super) fn for_what(self) -> &'static str {
        self.row()[2]
    }

    pub(super) fn is_met(self, version: (u32, u32)) -> bool {
        numbers(self.least()).is_none_or(|least| version >= least)
    }

    /// The complaint about a known version that is too old; `found` names the software.
    pub(super) fn lack(self, found: impl Display, version: Option<(u32, u32)>) -> Option<String> {
        let is_old = !self.is_met(version?);
        is_old.then(|| format!("{found} is older than {}: no {}", self.least(), self.for_what()))
    }
}

/// All software, in the order of the document.
#[cfg(test)]
pub(super) const SOFTWARE: [Software; 10] =
    [DRIVER, OPEN_MODULES, CUDA, LINUX, LIBIBVERBS, LIBMLX5, DMA_BUF_MR, DMA_BUF_UMEM, DEDICATED_UAR, GDRDRV];
pub(super) const DRIVER: Software = Software { name: "NVIDIA driver" };
pub(super) const OPEN_MODULES: Software = Software { name: "NVIDIA open kernel modules" };
pub(super) const CUDA: Software = Software { name: "CUDA of the driver" };
pub(super) const LINUX: Software = Software { name: "Linux" };
pub(super) const LIBIBVERBS: Software = Software { name: "rdma-core (libibverbs)" };
pub(super) const LIBMLX5: Software = Software { name: "rdma-core (libmlx5)" };
pub(super) const DMA_BUF_MR: Software = Software { name: "rdma-core (dma-bufs)" };
pub(super) const DMA_BUF_UMEM: Software = Software { name: "rdma-core (queues in GPU memory)" };
pub(super) const DEDICATED_UAR: Software = Software { name: "rdma-core (doorbell registers)" };
pub(super) const GDRDRV: Software = Software { name: "gdrdrv, where it is used" };

/// What packets travel over.
pub(super) const INFINIBAND: &str = "InfiniBand";
pub(super) const ROCE_V2: &str = "RoCE v2";
pub(super) const ROCE_V1: &str = "RoCE v1";

/// What a link needs.
pub(super) fn needs(link: &str) -> &'static str {
    rows("link").find(|[name, _]| *name == link).map_or("", |[_, needs]| needs)
}
