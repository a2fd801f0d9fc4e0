//! The commands that libraries give only by ioctl: doorbell pages and GIDs; DevX and dma-bufs, which are in modules of their own.

use std::os::fd::AsFd as _;

use gdsync_device::memory::{Memory, Word64, host_page};
use mlx5_ring::BF_OFFSET;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{Context, Result};
use crate::abi::{self, Plain, bytes_of, ib_uverbs_attr, ib_uverbs_gid_entry, ib_uverbs_ioctl_hdr};
use crate::address::Link;
use crate::log::log;
use crate::user::{Place, User, get};

/// The doorbell pages in a page of the host.
#[derive(Debug)]
pub(super) struct Uar {
    /// The first one.
    page: u32,
}

/// Bytes of a doorbell page.
const PAGE: u64 = 4096;
/// Bytes of half a register. libmlx5 writes to the halves in turns.
const BF_HALF: usize = 0x100;
/// Numbers of doorbell pages: CQs name theirs by 16 bits.
const PAGES: std::ops::Range<u32> = 0..1 << 16;
/// Doorbell pages in a page of the host, which libmlx5 maps and uses together.
pub(super) fn pages_per_uar() -> u32 {
    u32::try_from(host_page() / 4096).unwrap_or(1)
}

/// Attributes of the largest command.
const MAX_ATTRS: usize = 64;
/// Marks an attribute that the kernel has written.
const VALID_OUTPUT: u16 = 1 << 1;
/// Number of the loopback interface.
const INTERFACE_INDEX: u32 = 1;

/// Whether libibverbs gives this command by `write` where the ioctl is refused: all of the device, and the first two
/// methods of objects up to memory regions.
fn has_write_form(header: &ib_uverbs_ioctl_hdr) -> bool {
    header.object_id == 0 || header.object_id <= 7 && header.method_id <= 1
}

fn object_name(object: u16) -> &'static str {
    const CORE: [&str; 17] = [
        "DEVICE",
        "PD",
        "COMP_CHANNEL",
        "CQ",
        "QP",
        "SRQ",
        "AH",
        "MR",
        "MW",
        "FLOW",
        "XRCD",
        "RWQ_IND_TBL",
        "WQ",
        "FLOW_ACTION",
        "DM",
        "COUNTERS",
        "ASYNC_EVENT",
    ];
    const MLX5: [&str; 10] = [
        "DEVX",
        "DEVX_OBJ",
        "DEVX_UMEM",
        "FLOW_MATCHER",
        "DEVX_ASYNC_CMD_FD",
        "DEVX_ASYNC_EVENT_FD",
        "VAR",
        "PP",
        "UAR",
        "STEERING_ANCHOR",
    ];
    let names = if object < 0x1000 { &CORE[..] } else { &MLX5[..] };
    names.get(usize::from(object & 0xfff)).copied().unwrap_or("an unknown object")
}

/// An ioctl with its attributes.
pub(super) struct Call<'a> {
    user: &'a dyn User,
    /// Where the first attribute is.
    base: u64,
    attrs: Vec<ib_uverbs_attr>,
}

impl Call<'_> {
    fn find(&self, id: u16) -> Result<(usize, ib_uverbs_attr)> {
        let at = self.attrs.iter().position(|attr| attr.attr_id == id).ok_or(Errno::INVAL)?;
        Ok((at, self.attrs[at]))
    }

    /// A number of at most 8 bytes, which lies in the attribute itself.
    pub(super) fn number(&self, id: u16) -> Result<u64> {
        let (_, attr) = self.find(id)?;
        match attr.len {
            0..=8 => Ok(attr.data),
            _ => Err(Errno::INVAL),
        }
    }

    /// Bytes that the program gives. As many as a number has lie in the attribute itself.
    pub(super) fn bytes(&self, id: u16) -> Result<Vec<u8>> {
        let (_, attr) = self.find(id)?;
        let len = usize::from(attr.len);
        if len <= size_of_val(&attr.data) {
            return Ok(attr.data.to_ne_bytes()[..len].to_vec());
        }
        let mut bytes = vec![0; len];
        self.user.read(attr.data, &mut bytes)?;
        Ok(bytes)
    }

    /// Bytes that there is room for.
    pub(super) fn room(&self, id: u16) -> Result<usize> {
        self.find(id).map(|(_, attr)| attr.len.into())
    }

    /// Writes bytes, for which there is room, to where the attribute points.
    pub(super) fn put_bytes(&self, id: u16, bytes: &[u8]) -> Result<()> {
        let (at, attr) = self.find(id)?;
        self.user.write(attr.data, bytes)?;
        self.mark(at)
    }

    fn place(attr: &ib_uverbs_attr) -> Place {
        Place { addr: attr.data, len: attr.len.into() }
    }

    fn mark(&self, at: usize) -> Result<()> {
        let attr = ib_uverbs_attr { flags: self.attrs[at].flags | VALID_OUTPUT, ..self.attrs[at] };
        self.user.write(self.addr(at), bytes_of(&attr))
    }

    fn addr(&self, at: usize) -> u64 {
        self.base + (at * size_of::<ib_uverbs_attr>()) as u64
    }

    /// Writes to where the attribute points.
    pub(super) fn put<T: Plain>(&self, id: u16, value: &T) -> Result<()> {
        let (at, attr) = self.find(id)?;
        if usize::from(attr.len) < size_of::<T>() {
            return Err(Errno::NOSPC);
        }
        Self::place(&attr).put(self.user, value)?;
        self.mark(at)
    }

    /// Writes a handle into the attribute.
    pub(super) fn put_handle(&self, id: u16, handle: u32) -> Result<()> {
        let (at, attr) = self.find(id)?;
        self.user.write(self.addr(at), bytes_of(&ib_uverbs_attr { data: handle.into(), ..attr }))
    }
}

impl Context {
    /// Runs an `RDMA_VERBS_IOCTL` whose structure is at `addr`.
    ///
    /// # Errors
    /// The `errno` of the command; `EPROTONOSUPPORT` for all that libraries then give by `write`.
    pub(crate) fn ioctl(&self, user: &dyn User, addr: u64) -> Result<()> {
        let header: ib_uverbs_ioctl_hdr = get(user, addr)?;
        let count = usize::from(header.num_attrs);
        let len = size_of::<ib_uverbs_ioctl_hdr>() + count * size_of::<ib_uverbs_attr>();
        if count > MAX_ATTRS || usize::from(header.length) != len || header.reserved1 != 0 {
            return Err(Errno::INVAL);
        }
        let base = addr.checked_add(size_of::<ib_uverbs_ioctl_hdr>() as u64).ok_or(Errno::FAULT)?;
        let attr = |at: usize| get(user, base.wrapping_add((at * size_of::<ib_uverbs_attr>()) as u64));
        let attrs = (0..count).map(attr).collect::<Result<_>>()?;
        let call = Call { user, base, attrs };
        let done = match (header.object_id, header.method_id) {
            (abi::MLX5_IB_OBJECT_UAR, abi::MLX5_IB_METHOD_UAR_OBJ_ALLOC) => self.alloc_uar(&call),
            (abi::MLX5_IB_OBJECT_UAR, abi::MLX5_IB_METHOD_UAR_OBJ_DESTROY) => self.destroy_uar(&call),
            (abi::UVERBS_OBJECT_DEVICE, abi::UVERBS_METHOD_QUERY_GID_ENTRY) => self.query_gid(&call),
            (abi::UVERBS_OBJECT_DEVICE, abi::UVERBS_METHOD_QUERY_GID_TABLE) => self.query_gids(&call),
            (abi::UVERBS_OBJECT_MR, abi::UVERBS_METHOD_REG_DMABUF_MR) => self.register_dmabuf(&call),
            (
                object @ (abi::MLX5_IB_OBJECT_DEVX
                | abi::MLX5_IB_OBJECT_DEVX_OBJ
                | abi::MLX5_IB_OBJECT_DEVX_UMEM
                | abi::MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD),
                method,
            ) => self.devx(&call, object, method),
            _ => Err(Errno::PROTONOSUPPORT),
        };
        done.inspect_err(|error| {
            // An entry that is not there is no news: programs ask for all. Nor is a question with a descriptor of -1, and what
            // follows as a write command.
            if !matches!(*error, Errno::NODATA | Errno::BADF) && !has_write_form(&header) {
                log!("ioctl of {}, method {:#x}: {error}", object_name(header.object_id), header.method_id);
            }
        })
    }

    fn alloc_uar(&self, call: &Call<'_>) -> Result<()> {
        // Write-combining or not: ordinary memory is both.
        if call.number(abi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE)? > 1 {
            return Err(Errno::OPNOTSUPP);
        }
        let handle = self.new_handle();
        let mut uars = self.uars.lock();
        let pages = PAGES.step_by(pages_per_uar() as usize);
        let page = pages.skip(1).find(|page| uars.values().all(|uar| uar.page != *page));
        let page = page.ok_or(Errno::NOMEM)?;
        call.put(abi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, &(u64::from(page) * PAGE))?;
        let length = pages_per_uar() * 4096;
        call.put(abi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, &length)?;
        call.put(abi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, &page)?;
        call.put_handle(abi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, handle)?;
        uars.insert(handle, Uar { page });
        Ok(())
    }

    /// Whether the program has this doorbell page.
    pub(super) fn has_uar(&self, page: u32) -> bool {
        self.uars.lock().values().any(|uar| uar.page == page / pages_per_uar() * pages_per_uar())
    }

    #[cfg(test)]
    pub(super) fn add_uar(&self, page: u32) {
        self.uars.lock().insert(self.new_handle(), Uar { page });
    }

    /// Where the program may ring for a queue pair that uses this page: two registers of two halves each.
    ///
    /// # Errors
    /// `EINVAL` for a page that is not there, `ENOMEM`.
    pub(super) fn registers(&self, page: u32) -> Result<[Word64; 4]> {
        if !self.has_uar(page) {
            return Err(Errno::INVAL);
        }
        let [at, end] = [page, page + 1].map(|page| usize::try_from(u64::from(page) * PAGE));
        let (at, end) = (at.map_err(|_| Errno::NOMEM)?, end.map_err(|_| Errno::NOMEM)?);
        let file = Memory::map_shared(self.file.as_fd(), end).map_err(|_| Errno::NOMEM)?;
        let word = |half: usize| file.word64(at + BF_OFFSET + half * BF_HALF).map_err(|_| Errno::NOMEM);
        Ok([word(0)?, word(1)?, word(2)?, word(3)?])
    }

    fn destroy_uar(&self, call: &Call<'_>) -> Result<()> {
        let handle = call.number(abi::MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE)?;
        let handle = u32::try_from(handle).map_err(|_| Errno::NOENT)?;
        let uar = self.uars.lock().remove(&handle).ok_or(Errno::NOENT)?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // If it is refused, the page keeps what was written to it: doorbells of a queue pair that is gone.
        let length = u64::from(pages_per_uar()) * PAGE;
        _ = rustix::fs::fallocate(&self.file, hole, u64::from(uar.page) * PAGE, length);
        Ok(())
    }

    fn gid_entry(&self, index: u32) -> Result<ib_uverbs_gid_entry> {
        let port = self.hca.port;
        if index >= port.link.gids() {
            return Err(Errno::INVAL);
        }
        let (gid, kind) = port.gid(index).ok_or(Errno::NODATA)?;
        let [a, b] = *gid.0.as_chunks::<8>().0 else { return Err(Errno::INVAL) };
        Ok(ib_uverbs_gid_entry {
            gid: [a, b].map(u64::from_ne_bytes),
            gid_index: index,
            port_num: 1,
            gid_type: if self.hca.modes.no_gid_type { u32::MAX } else { kind as u32 },
            netdev_ifindex: if port.link == Link::Ethernet { INTERFACE_INDEX } else { 0 },
        })
    }

    fn query_gid(&self, call: &Call<'_>) -> Result<()> {
        let index = call.number(abi::UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX)?;
        if call.number(abi::UVERBS_ATTR_QUERY_GID_ENTRY_PORT)? != 1 {
            return Err(Errno::INVAL);
        }
        let entry = self.gid_entry(u32::try_from(index).map_err(|_| Errno::INVAL)?)?;
        call.put(abi::UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &entry)
    }

    fn query_gids(&self, call: &Call<'_>) -> Result<()> {
        let size = call.number(abi::UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE)?;
        let size = usize::try_from(size).ok().filter(|&size| size > 0).ok_or(Errno::INVAL)?;
        let (at, attr) = call.find(abi::UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES)?;
        let room = Call::place(&attr);
        let entries = (0..self.hca.port.link.gids()).filter_map(|index| self.gid_entry(index).ok());
        let entries: Vec<_> = entries.collect();
        if entries.len().checked_mul(size).is_none_or(|len| len > room.len) {
            return Err(Errno::INVAL);
        }
        for (n, entry) in entries.iter().enumerate() {
            let place = Place { len: size, ..room.after(n * size) };
            place.put(call.user, entry)?;
        }
        call.mark(at)?;
        call.put(abi::UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &(entries.len() as u64))
    }
}
