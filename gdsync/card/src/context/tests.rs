//! Whatever a program writes, the kernel's side does not crash, and touches no memory that it was not given.

use std::os::fd::{FromRawFd as _, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::OnceLock;

use bolero::check;

use super::*;
use crate::abi::{bytes_of, ib_uverbs_attr, ib_uverbs_cmd_hdr, ib_uverbs_ioctl_hdr};
use crate::address::Link;

/// A program whose only memory are these bytes, from `BASE` on.
#[derive(Debug)]
pub(super) struct Program(pub(super) Mutex<Vec<u8>>);

pub(super) const BASE: u64 = 0x1_0000;

impl Program {
    fn range(len: usize, addr: u64, size: usize) -> Result<std::ops::Range<usize>> {
        let start = addr.checked_sub(BASE).and_then(|at| usize::try_from(at).ok()).ok_or(Errno::FAULT)?;
        let end = start.checked_add(size).filter(|&end| end <= len).ok_or(Errno::FAULT)?;
        Ok(start..end)
    }
}

impl User for Program {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<()> {
        let memory = self.0.lock();
        out.copy_from_slice(&memory[Self::range(memory.len(), addr, out.len())?]);
        Ok(())
    }

    fn write(&self, addr: u64, bytes: &[u8]) -> Result<()> {
        let mut memory = self.0.lock();
        let range = Self::range(memory.len(), addr, bytes.len())?;
        memory[range].copy_from_slice(bytes);
        Ok(())
    }
}

fn hca() -> &'static Hca {
    static HCA: OnceLock<Hca> = OnceLock::new();
    HCA.get_or_init(|| Hca::start(Link::Ethernet).expect("a software HCA starts everywhere"))
}

fn file() -> OwnedFd {
    let file = rustix::fs::memfd_create(c"uverbs", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 32).unwrap();
    file
}

/// A command with lengths that add up, and its bytes behind the header.
fn command(number: u32, out_words: u16, body: &[u8]) -> Vec<u8> {
    let in_words = u16::try_from((size_of::<ib_uverbs_cmd_hdr>() + body.len()) / 4).unwrap();
    let header = ib_uverbs_cmd_hdr { command: number, in_words, out_words };
    [bytes_of(&header), body].concat()
}

/// An open context. The descriptors that a program would get are closed.
pub(super) fn open() -> Context {
    let context = Context::new(hca(), file());
    let program = Program(Mutex::new(vec![0; 4096]));
    let mut body = [0; 40];
    body[..8].copy_from_slice(&BASE.to_ne_bytes());
    context.write(&program, &command(abi::IB_USER_VERBS_CMD_GET_CONTEXT, 20, &body)).unwrap();
    close_channels(&context);
    context
}

pub(super) fn close_channels(context: &Context) {
    for fd in context.take_new_channels() {
        context.close_channel(fd);
        // SAFETY: the context gave it to the program, which is this test.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
}

#[test]
fn nothing_works_before_get_context() {
    let context = Context::new(hca(), file());
    let program = Program(Mutex::new(vec![0; 64]));
    let alloc_pd = command(abi::IB_USER_VERBS_CMD_ALLOC_PD, 2, &BASE.to_ne_bytes());
    assert_eq!(context.write(&program, &alloc_pd), Err(Errno::INVAL));
    let context = open();
    context.write(&program, &alloc_pd).unwrap();
    let dealloc_pd = |handle: u32| command(abi::IB_USER_VERBS_CMD_DEALLOC_PD, 0, &handle.to_ne_bytes());
    assert_eq!(context.write(&program, &dealloc_pd(1)), Err(Errno::INVAL), "there is none");
    assert_eq!(context.write(&program, &dealloc_pd(0)), Ok(()));
    assert_eq!(context.write(&program, &dealloc_pd(0)), Err(Errno::INVAL), "it is gone");
    let short = command(abi::IB_USER_VERBS_CMD_REG_MR, 3, &BASE.to_ne_bytes());
    assert_eq!(context.write(&program, &short), Err(Errno::NOSPC));
}

/// libibverbs does not ask for it, but a program may.
#[test]
fn a_dma_buf_stays_registered_when_its_rights_change() {
    use super::memory::{Mr, MrAttr};
    let context = open();
    let pd = Arc::new(Pd { pdn: 7 });
    let dma_buf = gdsync_device::memory::Memory::alloc(4096).unwrap();
    let attr = MrAttr { pd, start: 0, length: 4096, hca_va: 0, access_flags: 1, dma_buf: Some(dma_buf) };
    context.mrs.add(1, Mr::new(context.hca, attr).unwrap());
    let program = Program(Mutex::new(vec![0; 64]));
    let rereg = |flags, start, access_flags| {
        let request = abi::ib_uverbs_rereg_mr {
            response: BASE,
            mr_handle: 1,
            flags,
            start,
            length: 4096,
            hca_va: start,
            access_flags,
            ..Default::default()
        };
        context.write(&program, &command(abi::IB_USER_VERBS_CMD_REREG_MR, 2, bytes_of(&request)))
    };
    let is_dma_buf = || context.mrs.get(1).unwrap().attr.lock().dma_buf.is_some();
    assert_eq!(rereg(1 << 2, 0, 3), Ok(()));
    assert!(is_dma_buf(), "its address is none of the program's");
    let mine = gdsync_device::memory::Memory::alloc(4096).unwrap();
    assert_eq!(rereg(1, mine.addr(), 0), Ok(()));
    assert!(!is_dma_buf(), "its memory was exchanged");
}

#[test]
fn a_response_that_cannot_be_written_leaves_no_descriptor() {
    // Others of this process come and go: pipes with an end for the program are counted.
    let descriptors = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links.filter(|link| std::fs::read_link(link.path()).is_ok_and(|to| to.starts_with("pipe:"))).count()
    };
    let (context, program) = (open(), Program(Mutex::new(Vec::new())));
    let channel = command(abi::IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, 2, &BASE.to_ne_bytes());
    let mut body = [0; 40];
    body[..8].copy_from_slice(&BASE.to_ne_bytes());
    let get_context = command(abi::IB_USER_VERBS_CMD_GET_CONTEXT, 20, &body);
    let before = descriptors();
    for _ in 0..200 {
        assert_eq!(context.write(&program, &channel), Err(Errno::FAULT));
        assert_eq!(Context::new(hca(), file()).write(&program, &get_context), Err(Errno::FAULT));
    }
    assert!(descriptors() < before + 200, "descriptors are left");
}

#[test]
fn any_bytes_are_no_harm_as_a_command() {
    let context = AssertUnwindSafe(open());
    check!().with_type::<Vec<u8>>().for_each(|bytes| {
        let program = Program(Mutex::new(vec![0; 256]));
        _ = context.write(&program, bytes);
        close_channels(&context);
    });
}

#[test]
fn any_fields_are_no_harm_in_a_command() {
    let context = AssertUnwindSafe(open());
    check!().with_type::<(u8, bool, u16, Vec<u32>)>().for_each(|(number, is_extended, out_words, words)| {
        let program = Program(Mutex::new(vec![0; 4096]));
        let mut body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let number = u32::from(*number) % 64;
        let bytes = if *is_extended {
            body.resize(body.len().next_multiple_of(8), 0);
            let words = |bytes: usize| u16::try_from(bytes / 8).unwrap();
            let header = ib_uverbs_cmd_hdr {
                command: number | abi::IB_USER_VERBS_CMD_FLAG_EXTENDED,
                in_words: words(body.len()),
                out_words: out_words % 64,
            };
            let response = if out_words % 64 == 0 { 0 } else { BASE };
            let extension = abi::ib_uverbs_ex_cmd_hdr { response, ..Default::default() };
            [bytes_of(&header), bytes_of(&extension), &body].concat()
        } else {
            // The response goes somewhere.
            let body = [&BASE.to_ne_bytes()[..], &body].concat();
            command(number, *out_words % 64, &body)
        };
        _ = context.write(&program, &bytes);
        close_channels(&context);
    });
}

#[test]
fn any_bytes_are_no_harm_as_an_ioctl() {
    let context = AssertUnwindSafe(open());
    check!().with_type::<(u16, u16, Vec<(u16, u16, u64)>)>().for_each(|(object, method, attrs)| {
        let attrs: Vec<_> = attrs
            .iter()
            .take(64)
            .map(|&(id, len, data)| ib_uverbs_attr {
                attr_id: id % 0x1008,
                len,
                flags: 1,
                attr_data: 0,
                data,
            })
            .collect();
        let size = size_of::<ib_uverbs_ioctl_hdr>() + attrs.len() * size_of::<ib_uverbs_attr>();
        let header = ib_uverbs_ioctl_hdr {
            length: u16::try_from(size).unwrap(),
            object_id: (object % 18) | ((object & 1) << 12),
            method_id: (method % 8) | ((object & 1) << 12),
            num_attrs: u16::try_from(attrs.len()).unwrap(),
            ..Default::default()
        };
        let mut memory = bytes_of(&header).to_vec();
        attrs.iter().for_each(|attr| memory.extend_from_slice(bytes_of(attr)));
        memory.resize(memory.len() + 512, 0);
        _ = context.ioctl(&Program(Mutex::new(memory)), BASE);
    });
}
