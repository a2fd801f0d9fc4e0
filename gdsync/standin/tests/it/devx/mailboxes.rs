//! Commands that a card would refuse, as bytes: the stand-in refuses them with a status and a syndrome.

use std::ffi::c_int;
use std::ptr;

use gdsync::memory::Memory;
use gdsync_testkit::driver::Control;
use rdma_core_sys::mlx5::{
    devx_get, devx_set, devx_set64, mlx5dv_devx_obj, mlx5dv_devx_umem, mlx5dv_obj, mlx5dv_obj_type,
    mlx5dv_pd, mlx5dv_uar_alloc_type,
};
use rdma_core_sys::verbs::{ibv_access_flags, ibv_context, ibv_pd};
use rdma_core_sys::{Mlx5, Verbs};

/// What was said: the number of libmlx5, the status, and the number of the object.
type Said = (c_int, u32, u32);

const BAD_OP: u32 = 0x02;
const BAD_PARAM: u32 = 0x03;
const BAD_RES: u32 = 0x05;
const LIM: u32 = 0x08;
const BAD_QP_STATE: u32 = 0x10;
const BAD_SIZE: u32 = 0x40;
const BAD_INP_LEN: u32 = 0x50;

struct Card {
    mlx5: &'static Mlx5,
    verbs: &'static Verbs,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    umem: *mut mlx5dv_devx_umem,
    memory: Memory,
    uar_page: u32,
    eqn: u32,
    pdn: u32,
}

impl Card {
    fn open() -> Self {
        let (verbs, mlx5) = (Verbs::load().unwrap(), Mlx5::load().unwrap());
        // SAFETY: no count is asked for.
        let list = unsafe { verbs.ibv_get_device_list(ptr::null_mut()) };
        // SAFETY: the list has the card.
        let device = unsafe { *list };
        // SAFETY: it is in the list.
        let context = unsafe { verbs.ibv_open_device(device) };
        // SAFETY: the list is not used any more.
        unsafe { verbs.ibv_free_device_list(list) };
        // SAFETY: the device is open.
        let pd = unsafe { verbs.ibv_alloc_pd(context) };
        let mut told = mlx5dv_pd::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        (object.pd.r#in, object.pd.out) = (pd, &raw mut told);
        // SAFETY: object and place belong together.
        assert_eq!(unsafe { mlx5.mlx5dv_init_obj(&raw mut object, mlx5dv_obj_type::MLX5DV_OBJ_PD) }, 0);
        let memory = Memory::alloc(1 << 16).unwrap();
        for slot in 0..1024 {
            memory.write(slot * 64 + 63, &[0xff]).unwrap();
        }
        let rights = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let addr = usize::try_from(memory.addr()).unwrap() as *mut _;
        // SAFETY: the memory stays as long as this.
        let umem = unsafe { mlx5.mlx5dv_devx_umem_reg(context, addr, memory.len(), rights) };
        let kind = mlx5dv_uar_alloc_type::MLX5DV_UAR_ALLOC_TYPE_NC;
        // SAFETY: the device is open.
        let uar = unsafe { mlx5.mlx5dv_devx_alloc_uar(context, kind) };
        // SAFETY: just made.
        let uar_page = unsafe { (*uar).page_id };
        let mut eqn = 0;
        // SAFETY: the device is open; a place for the answer.
        assert_eq!(unsafe { mlx5.mlx5dv_devx_query_eqn(context, 0, &raw mut eqn) }, 0);
        Self { mlx5, verbs, context, pd, umem, memory, uar_page, eqn, pdn: told.pdn }
    }

    fn umem_id(&self) -> u32 {
        // SAFETY: it is registered as long as this.
        unsafe { (*self.umem).umem_id }
    }

    /// A good CREATE_CQ of 16 entries at the beginning of the memory.
    fn cq(&self) -> Vec<u8> {
        let mut command = vec![0; 272];
        for (offset, width, value) in [
            (0, 16, 0x400),
            (0x86, 1, 1),
            (0x8e, 1, 1),
            (0xa0, 32, self.umem_id()),
            (0xe3, 5, 4),
            (0xe8, 24, self.uar_page),
            (0x138, 8, self.eqn),
            (0x2c0, 32, self.umem_id()),
            (0x2e0, 1, 1),
        ] {
            devx_set(&mut command, offset, width, value);
        }
        devx_set64(&mut command, 0x240, 0x8000);
        command
    }

    /// A good CREATE_QP of 16 entries and blocks.
    fn qp(&self, cqn: u32) -> Vec<u8> {
        let mut command = vec![0; 272];
        for (offset, width, value) in [
            (0, 16, 0x500),
            (0xd3, 2, 3),
            (0xe8, 24, self.pdn),
            (0x109, 4, 4),
            (0x111, 4, 4),
            (0x128, 24, self.uar_page),
            (0x4a8, 24, cqn),
            (0x5a8, 24, cqn),
            (0x743, 1, 1),
            (0x7e0, 32, self.umem_id()),
            (0x840, 32, self.umem_id()),
            (0x860, 1, 1),
        ] {
            devx_set(&mut command, offset, width, value);
        }
        devx_set64(&mut command, 0x5c0, 0x8008);
        devx_set64(&mut command, 0x800, 0x1000);
        command
    }

    fn create(&self, command: &[u8]) -> (*mut mlx5dv_devx_obj, Said) {
        let mut answer = [0u8; 16];
        // SAFETY: the device is open, the buffers are as long as told.
        let object = unsafe {
            self.mlx5.mlx5dv_devx_obj_create(
                self.context,
                command.as_ptr().cast(),
                command.len(),
                answer.as_mut_ptr().cast(),
                answer.len(),
            )
        };
        let errno =
            if object.is_null() { std::io::Error::last_os_error().raw_os_error().unwrap() } else { 0 };
        let status = devx_get(&answer, 0, 8);
        assert_eq!(status != 0, devx_get(&answer, 0x20, 32) != 0, "a status has a syndrome");
        (object, (errno, status, devx_get(&answer, 0x48, 24)))
    }

    fn refuse(&self, good: &[u8], change: impl FnOnce(&mut Vec<u8>), status: u32) {
        let mut command = good.to_vec();
        change(&mut command);
        let (object, said) = self.create(&command);
        assert!(object.is_null() && said.1 == status && said.0 != 0, "{said:x?} where {status:#x} is due");
    }

    fn modify(&self, object: *mut mlx5dv_devx_obj, command: &[u8]) -> (c_int, u32) {
        let mut answer = [0u8; 16];
        // SAFETY: the object is there, the buffers are as long as told.
        let errno = unsafe {
            self.mlx5.mlx5dv_devx_obj_modify(
                object,
                command.as_ptr().cast(),
                command.len(),
                answer.as_mut_ptr().cast(),
                answer.len(),
            )
        };
        (errno, devx_get(&answer, 0, 8))
    }

    fn destroy(&self, object: *mut mlx5dv_devx_obj) -> c_int {
        // SAFETY: made by `create`; what is refused stays.
        unsafe { self.mlx5.mlx5dv_devx_obj_destroy(object) }
    }
}

fn set(offset: usize, width: u32, value: u32) -> impl FnOnce(&mut Vec<u8>) {
    move |command| devx_set(command, offset, width, value)
}

#[test]
fn what_a_card_would_refuse_is_refused() {
    let _control = Control::take();
    let card = Card::open();
    let good = card.cq();
    card.refuse(&good, |command| command.truncate(200), BAD_INP_LEN);
    card.refuse(&good, set(0, 16, 0x999), BAD_OP);
    card.refuse(&good, set(0x2c0, 32, 0xffff), BAD_RES);
    card.refuse(&good, set(0x2e0, 1, 0), BAD_PARAM);
    card.refuse(&good, set(0xe3, 5, 11), BAD_SIZE);
    card.refuse(&good, set(0xe3, 5, 23), LIM);
    card.refuse(&good, set(0x138, 8, card.eqn + 1), BAD_PARAM);
    card.refuse(&good, set(0xe8, 24, 0xffff), BAD_RES);
    card.refuse(&good, set(0x8b, 1, 1), BAD_PARAM);
    card.refuse(&good, |command| devx_set64(command, 0x280, 0x20), BAD_PARAM);
    card.refuse(&good, |command| devx_set64(command, 0x240, 1 << 40), BAD_SIZE);
    let (cq, (errno, status, cqn)) = card.create(&good);
    assert!(!cq.is_null() && (errno, status) == (0, 0) && cqn != 0);

    let good = card.qp(cqn);
    card.refuse(&good, set(0xe8, 24, 0xff_ffff), BAD_RES);
    card.refuse(&good, set(0x4a8, 24, cqn + 1), BAD_RES);
    card.refuse(&good, set(0x111, 4, 15), BAD_SIZE);
    // Payload in CQEs, a queue pair without a receive queue, the mode without records.
    card.refuse(&good, set(0xc0 + 0x630, 8, 1), BAD_PARAM);
    card.refuse(&good, set(0xc0 + 0x565, 3, 3), BAD_PARAM);
    card.refuse(&good, set(0xc0 + 0x80, 2, 1), BAD_PARAM);
    let (qp, (_, status, qpn)) = card.create(&good);
    assert_eq!(status, 0);
    // Its doorbell page is its own, and what it uses stays.
    card.refuse(&good, |_| {}, BAD_RES);
    assert_eq!(card.destroy(cq), libc::EBUSY);
    // SAFETY: the domain is there; what is refused stays.
    assert_eq!(unsafe { card.verbs.ibv_dealloc_pd(card.pd) }, libc::EBUSY);
    // SAFETY: as above.
    assert_eq!(unsafe { card.mlx5.mlx5dv_devx_umem_dereg(card.umem) }, libc::EBUSY);

    steps_are_checked(&card, qp, qpn);

    assert_eq!(card.destroy(qp), 0);
    assert_eq!(card.destroy(cq), 0);
    // SAFETY: nothing uses it any more.
    assert_eq!(unsafe { card.mlx5.mlx5dv_devx_umem_dereg(card.umem) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { card.verbs.ibv_dealloc_pd(card.pd) }, 0);
    assert_eq!(card.memory.len(), 1 << 16);
    // SAFETY: as above.
    assert_eq!(unsafe { card.verbs.ibv_close_device(card.context) }, 0);
}

fn steps_are_checked(card: &Card, qp: *mut mlx5dv_devx_obj, qpn: u32) {
    let step = |opcode, fields: &[(usize, u32, u32)]| {
        let mut command = vec![0; 272];
        for &(offset, width, value) in [(0, 16, opcode), (0x48, 24, qpn), (0xd3, 2, 3)].iter().chain(fields) {
            devx_set(&mut command, offset, width, value);
        }
        command
    };
    let port = (0xc0 + 0xc0 + 0x128, 8, 1);
    // Out of turn.
    for opcode in [0x503, 0x504, 0x505, 0x50e] {
        assert_eq!(card.modify(qp, &step(opcode, &[port])), (libc::EINVAL, BAD_QP_STATE), "{opcode:#x}");
    }
    assert_eq!(card.modify(qp, &step(0x500, &[])).1, BAD_OP);
    assert_eq!(card.modify(qp, &step(0x502, &[port, (0x48, 24, qpn + 1)])).1, BAD_RES);
    assert_eq!(card.modify(qp, &step(0x502, &[port])[..100]).1, BAD_INP_LEN);
    assert_eq!(card.modify(qp, &step(0x502, &[])).1, BAD_PARAM);
    // Atomics without a mode.
    assert_eq!(card.modify(qp, &step(0x502, &[port, (0xc0 + 0x492, 1, 1)])).1, BAD_PARAM);
    assert_eq!(card.modify(qp, &step(0x502, &[port])), (0, 0));
    assert_eq!(card.modify(qp, &step(0x502, &[port])).1, BAD_QP_STATE);
    // No path.
    assert_eq!(card.modify(qp, &step(0x503, &[port, (0x103, 5, 30), (0x100, 3, 3)])).1, BAD_PARAM);
    // To ERR and back to the beginning, from anywhere.
    assert_eq!(card.modify(qp, &step(0x507, &[])[..16]), (0, 0));
    let mut answer = [0u8; 272];
    let query = &step(0x50b, &[])[..16];
    // SAFETY: the object is there, the buffers are as long as told.
    let errno = unsafe {
        card.mlx5.mlx5dv_devx_obj_query(
            qp,
            query.as_ptr().cast(),
            query.len(),
            answer.as_mut_ptr().cast(),
            answer.len(),
        )
    };
    assert_eq!((errno, devx_get(&answer, 0xc0, 4)), (0, 6));
    assert_eq!(card.modify(qp, &step(0x50a, &[])[..16]), (0, 0));
    assert_eq!(card.modify(qp, &step(0x502, &[port])), (0, 0));
}
