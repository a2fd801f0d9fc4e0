//! Commands as a program gives them, right ones and any bytes.

use std::panic::AssertUnwindSafe;

use bolero::check;
use gdsync_device::memory::Memory;
use parking_lot::Mutex;
use rdma_core_sys::mlx5::ifc::{
    Field, Opcode, Status, answer, atomic_cap, cap, command, cqc, create_cq, create_qp, event, path, qpc,
    query_roce_address, rmp_wq, roce_cap,
};
use rustix::fd::{FromRawFd as _, OwnedFd};

use super::firmware::Response;
use super::umem::Umem;
use super::*;
use crate::abi::{bytes_of, ib_uverbs_attr, ib_uverbs_ioctl_hdr};
use crate::context::Pd;
use crate::context::tests::{BASE, Program, close_channels, open};

/// A command, field by field.
#[derive(Clone)]
struct Mailbox(Vec<u8>);

impl Mailbox {
    fn new(opcode: Opcode) -> Self {
        Self(vec![0; command::LONG]).set(command::OPCODE, opcode.0.into())
    }

    fn set(mut self, field: Field, value: u32) -> Self {
        field.set(&mut self.0, value);
        self
    }

    fn set64(mut self, field: Field, value: u64) -> Self {
        field.set64(&mut self.0, value);
        self
    }
}

/// An attribute that points to bytes behind all attributes, or has a value.
enum Attr<'a> {
    Value(u64),
    Bytes(&'a [u8]),
    Room(usize),
}

/// Runs a method. Returns the attributes as the kernel left them, and the contents of the last one.
fn method(
    context: &Context,
    object: u16,
    method: u16,
    attrs: &[(u16, Attr<'_>)],
) -> (Result<()>, Vec<u64>, Vec<u8>) {
    let (head, each) = (size_of::<ib_uverbs_ioctl_hdr>(), size_of::<ib_uverbs_attr>());
    let size = head + attrs.len() * each;
    let header = ib_uverbs_ioctl_hdr {
        length: u16::try_from(size).unwrap(),
        object_id: object,
        method_id: method,
        num_attrs: u16::try_from(attrs.len()).unwrap(),
        ..Default::default()
    };
    let (mut memory, mut rest) = (bytes_of(&header).to_vec(), Vec::new());
    let mut last = 0..0;
    for (id, attr) in attrs {
        let (len, data) = match attr {
            Attr::Value(value) => (8, *value),
            Attr::Bytes(bytes) if bytes.len() <= 8 => {
                let mut value = [0; 8];
                value[..bytes.len()].copy_from_slice(bytes);
                (bytes.len(), u64::from_ne_bytes(value))
            }
            Attr::Bytes(_) | Attr::Room(_) => {
                let bytes = if let Attr::Bytes(bytes) = attr { bytes.to_vec() } else { vec![] };
                let len = if let Attr::Room(len) = attr { *len } else { bytes.len() };
                last = size + rest.len()..size + rest.len() + len;
                rest.extend_from_slice(&bytes);
                rest.resize(last.end - size, 0);
                (len, BASE + last.start as u64)
            }
        };
        let len = u16::try_from(len).unwrap();
        let attr = ib_uverbs_attr { attr_id: *id, len, flags: 1, attr_data: 0, data };
        memory.extend_from_slice(bytes_of(&attr));
    }
    memory.extend_from_slice(&rest);
    let program = Program(Mutex::new(memory));
    let done = context.ioctl(&program, BASE);
    let memory = program.0.into_inner();
    let data = |at: usize| u64::from_ne_bytes(*memory[head + at * each + 8..].first_chunk().unwrap());
    (done, (0..attrs.len()).map(data).collect(), memory[last].to_vec())
}

/// A command to an object, or to the device (no handle). Returns the handle, or the status of a refusal, and the answer.
fn run(
    context: &Context,
    (object, number): (u16, u16),
    handle: Option<u64>,
    input: &[u8],
    room: usize,
) -> (std::result::Result<u64, Status>, Vec<u8>) {
    let first = if handle.is_some() { 1 } else { 0 };
    let mut attrs = vec![(0x1000 + first, Attr::Bytes(input)), (0x1001 + first, Attr::Room(room))];
    handle.into_iter().for_each(|handle| attrs.insert(0, (0x1000, Attr::Value(handle))));
    let (done, data, answer) = method(context, object, number, &attrs);
    let status = Status(answer::STATUS.get(&answer).try_into().unwrap());
    match done {
        Ok(()) => (Ok(data[0]), answer),
        Err(errno) => {
            assert_eq!(errno, if status == Status::BAD_OP { Errno::OPNOTSUPP } else { Errno::REMOTEIO });
            assert_ne!(status, Status::OK);
            (Err(status), answer)
        }
    }
}

const CREATE: (u16, u16) = (abi::MLX5_IB_OBJECT_DEVX_OBJ, abi::MLX5_IB_METHOD_DEVX_OBJ_CREATE);
const MODIFY: (u16, u16) = (abi::MLX5_IB_OBJECT_DEVX_OBJ, abi::MLX5_IB_METHOD_DEVX_OBJ_MODIFY);
const QUERY: (u16, u16) = (abi::MLX5_IB_OBJECT_DEVX_OBJ, abi::MLX5_IB_METHOD_DEVX_OBJ_QUERY);
const OTHER: (u16, u16) = (abi::MLX5_IB_OBJECT_DEVX, abi::MLX5_IB_METHOD_DEVX_OTHER);

fn destroy(context: &Context, handle: u64) -> Result<()> {
    let object = abi::MLX5_IB_OBJECT_DEVX_OBJ;
    method(context, object, abi::MLX5_IB_METHOD_DEVX_OBJ_DESTROY, &[(0x1000, Attr::Value(handle))]).0
}

/// A context with DevX that has a protection domain, a doorbell page, and a umem.
struct Bench {
    context: Context,
    umem: u32,
    uar: u32,
    memory: Memory,
}

const PDN: u32 = 0x77;
/// Where in the umem things are.
const RECORD: u64 = 0x8000;

impl Bench {
    fn new() -> Self {
        let context = open();
        context.devx.grant();
        context.pds.add(context.new_handle(), Arc::new(Pd { pdn: PDN }));
        let uar = 9;
        context.add_uar(uar);
        let memory = Memory::alloc(0x1_0000).unwrap();
        let (umem, shared) = (context.new_handle(), memory.clone());
        context.devx.umems.add(umem, Arc::new(Umem::new(shared, true)));
        Self { context, umem, uar, memory }
    }

    fn create(&self, mailbox: &Mailbox) -> std::result::Result<(u64, u32), Status> {
        let room = command::SHORT;
        let attrs = [
            (abi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE, Attr::Value(0)),
            (abi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN, Attr::Bytes(&mailbox.0)),
            (abi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT, Attr::Room(room)),
        ];
        let (done, data, answer) = method(&self.context, CREATE.0, CREATE.1, &attrs);
        match done {
            Ok(()) => Ok((data[0], answer::NUMBER.get(&answer))),
            Err(errno) => {
                let status = Status(answer::STATUS.get(&answer).try_into().unwrap());
                assert_eq!(errno, if status == Status::BAD_OP { Errno::OPNOTSUPP } else { Errno::REMOTEIO });
                Err(status)
            }
        }
    }

    fn cq(&self) -> Mailbox {
        let cqc = |field: Field| field.inside(create_cq::CONTEXT);
        Mailbox::new(Opcode::CREATE_CQ)
            .set(cqc(cqc::DBR_UMEM_ID), self.umem)
            .set(cqc(cqc::LOG_CQ_SIZE), 4)
            .set(cqc(cqc::UAR_PAGE), self.uar)
            .set(cqc(cqc::C_EQN), EQN + 1)
            .set64(cqc(cqc::DBR_ADDR), RECORD)
            .set(create_cq::CQ_UMEM_ID, self.umem)
    }

    fn rmp(&self) -> Mailbox {
        Mailbox::new(Opcode::CREATE_RMP)
            .set(rmp_wq::LOG_WQ_STRIDE, 6)
            .set(rmp_wq::LOG_WQ_SZ, 3)
            .set(rmp_wq::DBR_UMEM_ID, self.umem)
            .set(rmp_wq::WQ_UMEM_ID, self.umem)
            .set64(rmp_wq::DBR_ADDR, RECORD + 64)
            .set64(rmp_wq::WQ_UMEM_OFFSET, 0x1000)
    }

    fn qp(&self, cqn: u32) -> Mailbox {
        let qpc = |field: Field| field.inside(create_qp::CONTEXT);
        Mailbox::new(Opcode::CREATE_QP)
            .set(qpc(qpc::PM_STATE), 3)
            .set(qpc(qpc::PD), PDN)
            .set(qpc(qpc::LOG_RQ_SIZE), 3)
            .set(qpc(qpc::LOG_RQ_STRIDE), 2)
            .set(qpc(qpc::LOG_SQ_SIZE), 4)
            .set(qpc(qpc::UAR_PAGE), self.uar)
            .set(qpc(qpc::USER_INDEX), 0x1234)
            .set(qpc(qpc::CQN_SND), cqn)
            .set(qpc(qpc::CQN_RCV), cqn)
            .set64(qpc(qpc::DBR_ADDR), RECORD + 128)
            .set(qpc(qpc::DBR_UMEM_ID), self.umem)
            .set64(create_qp::WQ_UMEM_OFFSET, 0x2000)
            .set(create_qp::WQ_UMEM_ID, self.umem)
    }

    fn step(
        &self,
        qp: (u64, u32),
        opcode: Opcode,
        fields: &[(Field, u32)],
    ) -> std::result::Result<(), Status> {
        let mut mailbox = Mailbox::new(opcode).set(command::NUMBER, qp.1);
        for &(field, value) in fields {
            mailbox = mailbox.set(field.inside(create_qp::CONTEXT), value);
        }
        if opcode == Opcode::INIT2RTR_QP {
            let port = self.context.hca.port;
            let at = create_qp::CONTEXT;
            mailbox.0[(at + path::RGID) / 8..][..16].copy_from_slice(&port.link_local().0);
            mailbox.0[(at + path::RMAC) / 8..][..6].copy_from_slice(&port.mac());
        }
        run(&self.context, MODIFY, Some(qp.0), &mailbox.0, command::SHORT).0.map(drop)
    }

    /// The field of the context of a queue pair.
    fn field(&self, qp: (u64, u32), field: Field) -> u32 {
        let query = Mailbox::new(Opcode::QUERY_QP).set(command::NUMBER, qp.1);
        let (done, answer) = run(&self.context, QUERY, Some(qp.0), &query.0, command::LONG);
        done.unwrap();
        field.inside(create_qp::CONTEXT).get(&answer)
    }
}

const TO_INIT: &[(Field, u32)] = &[(path::VHCA_PORT_NUM, 1), (qpc::RWE, 1)];
const TO_RTS: &[(Field, u32)] = &[(qpc::NEXT_SEND_PSN, 5), (path::ACK_TIMEOUT, 14), (qpc::RETRY_COUNT, 7)];

fn to_rtr(qp: (u64, u32)) -> Vec<(Field, u32)> {
    vec![
        (path::SRC_ADDR_INDEX, 1),
        (path::HOP_LIMIT, 1),
        (path::UDP_SPORT, 0xc001),
        (qpc::MTU, 5),
        (qpc::LOG_MSG_MAX, 30),
        (qpc::REMOTE_QPN, qp.1),
        (qpc::NEXT_RCV_PSN, 5),
        (qpc::MIN_RNR_NAK, 12),
    ]
}

#[test]
fn queues_are_made_used_and_ended() {
    let bench = Bench::new();
    let cq = bench.create(&bench.cq()).unwrap();
    let rmp = bench.create(&bench.rmp()).unwrap();
    let qpc = |field: Field| field.inside(create_qp::CONTEXT);
    let shared = bench.qp(cq.1).set(qpc(qpc::RQ_TYPE), 1).set(qpc(qpc::SRQN_RMPN), rmp.1);
    let shared = bench.create(&shared.set64(qpc(qpc::DBR_ADDR), RECORD + 192)).unwrap();
    let qp = bench.create(&bench.qp(cq.1)).unwrap();
    assert_eq!((bench.field(qp, qpc::STATE), bench.field(qp, qpc::USER_INDEX)), (0, 0x1234));
    // In the order of the states; each needs the one before.
    assert_eq!(bench.step(qp, Opcode::RTR2RTS_QP, TO_RTS), Err(Status::BAD_QP_STATE));
    bench.step(qp, Opcode::RST2INIT_QP, TO_INIT).unwrap();
    bench.step(qp, Opcode::INIT2RTR_QP, &to_rtr(qp)).unwrap();
    bench.step(qp, Opcode::RTR2RTS_QP, TO_RTS).unwrap();
    let asked =
        [qpc::STATE, qpc::RWE, qpc::REMOTE_QPN, qpc::NEXT_SEND_PSN].map(|field| bench.field(qp, field));
    assert_eq!(asked, [3, 1, qp.1, 5]);
    // Each right by its own bit: that of RRE, with RWE 0.
    let allow = Mailbox::new(Opcode::RTS2RTS_QP).set(command::NUMBER, qp.1).set(qpc(qpc::RRE), 1);
    let allow = allow.set(command::OPT_PARAM_MASK, 1 << 1);
    run(&bench.context, MODIFY, Some(qp.0), &allow.0, command::SHORT).0.unwrap();
    assert_eq!([qpc::RRE, qpc::RWE].map(|field| bench.field(qp, field)), [1, 1]);
    // A NOP with a completion, found by the doorbell record, as no register is written.
    let nop = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0];
    let mut nop: [u8; 16] = nop;
    nop[4..8].copy_from_slice(&(qp.1 << 8 | 1).to_be_bytes());
    // No completion has this opcode.
    bench.memory.fill(0, 64, 0xff).unwrap();
    bench.memory.write(0x2000 + (64 << 3), &nop).unwrap();
    bench.memory.write(usize::try_from(RECORD).unwrap() + 128 + 4, &1u32.to_be_bytes()).unwrap();
    let start = std::time::Instant::now();
    let mut cqe = [0; 64];
    while cqe[63] >> 4 != 0 || cqe == [0; 64] {
        assert!(start.elapsed().as_secs() < 20, "{cqe:?}");
        bench.memory.read(0, &mut cqe).unwrap();
    }
    let uidx = u32::from_be_bytes([0, cqe[33], cqe[34], cqe[35]]);
    assert_eq!(uidx, 0x1234, "a completion has the user index");
    bench.step(qp, Opcode::TO_ERR_QP, &[]).unwrap();
    assert_eq!(bench.field(qp, qpc::STATE), 6);
    bench.step(qp, Opcode::TO_RST_QP, &[]).unwrap();
    // Nothing goes before what uses it.
    let umem = Attr::Value(bench.umem.into());
    let dereg = abi::MLX5_IB_METHOD_DEVX_UMEM_DEREG;
    let dereg = method(&bench.context, abi::MLX5_IB_OBJECT_DEVX_UMEM, dereg, &[(0x1000, umem)]).0;
    assert_eq!(dereg, Err(Errno::BUSY));
    for used in [cq, rmp] {
        assert_eq!(destroy(&bench.context, used.0), Err(Errno::BUSY));
    }
    for object in [qp, shared, cq, rmp] {
        destroy(&bench.context, object.0).unwrap();
        assert_eq!(destroy(&bench.context, object.0), Err(Errno::NOENT));
    }
}

#[test]
fn what_the_firmware_does_not_have_is_refused() {
    let bench = Bench::new();
    let cqc = |field: Field| field.inside(create_cq::CONTEXT);
    let qpc = |field: Field| field.inside(create_qp::CONTEXT);
    let (_, cqn) = bench.create(&bench.cq()).unwrap();
    let short = Mailbox(bench.cq().0[..command::SHORT].to_vec());
    let refused = [
        (short, Status::BAD_INPUT_LEN),
        (Mailbox::new(Opcode(0x200)), Status::BAD_OP),
        (bench.cq().set(create_cq::CQ_UMEM_ID, 0xdead), Status::BAD_RES),
        (bench.cq().set(cqc(cqc::LOG_CQ_SIZE), 23), Status::LIM_ERR),
        (bench.cq().set(cqc(cqc::LOG_CQ_SIZE), 11), Status::BAD_SIZE),
        (bench.cq().set64(create_cq::CQ_UMEM_OFFSET, u64::MAX), Status::BAD_SIZE),
        (bench.cq().set64(cqc(cqc::DBR_ADDR), 4), Status::BAD_PARAM),
        (bench.cq().set(cqc(cqc::C_EQN), EQN + VECTORS), Status::BAD_RES),
        (bench.cq().set(cqc(cqc::UAR_PAGE), 10), Status::BAD_RES),
        (bench.cq().set(cqc(cqc::CQE_COMP_EN), 1), Status::BAD_PARAM),
        (bench.rmp().set(rmp_wq::WQ_TYPE, 3), Status::BAD_PARAM),
        (bench.rmp().set(rmp_wq::LOG_WQ_STRIDE, 4), Status::LIM_ERR),
        (bench.qp(cqn + 1), Status::BAD_RES),
        (bench.qp(cqn).set(qpc(qpc::ST), 3), Status::BAD_PARAM),
        (bench.qp(cqn).set(qpc(qpc::PD), 1), Status::BAD_RES),
        (bench.qp(cqn).set(qpc(qpc::RQ_TYPE), 1), Status::BAD_RES),
        (bench.qp(cqn).set(qpc(qpc::RQ_TYPE), 2), Status::BAD_PARAM),
        (bench.qp(cqn).set(qpc(qpc::LOG_SQ_SIZE), 15), Status::BAD_SIZE),
    ];
    for (n, (mailbox, status)) in refused.into_iter().enumerate() {
        assert_eq!(bench.create(&mailbox), Err(status), "{n}");
    }
    let qp = bench.create(&bench.qp(cqn)).unwrap();
    assert_eq!(bench.step((qp.0, qp.1 + 1), Opcode::RST2INIT_QP, TO_INIT), Err(Status::BAD_RES));
    assert_eq!(bench.step(qp, Opcode::RST2INIT_QP, &[]), Err(Status::BAD_PARAM), "no port");
    bench.step(qp, Opcode::RST2INIT_QP, TO_INIT).unwrap();
    for (field, value) in [
        (qpc::MTU, 0),
        (qpc::MTU, 6),
        (qpc::LOG_MSG_MAX, 0),
        (path::HOP_LIMIT, 0),
        (path::UDP_SPORT, 1),
        (qpc::LOG_RRA_MAX, 5),
    ] {
        let mut fields = to_rtr(qp);
        fields.push((field, value));
        let refused = bench.step(qp, Opcode::INIT2RTR_QP, &fields);
        assert!(matches!(refused, Err(Status::BAD_PARAM | Status::LIM_ERR)), "{field:?} is {value}");
    }
    assert_eq!(bench.field(qp, qpc::STATE), 1);
}

#[test]
fn the_device_tells_what_it_can() {
    let context = open();
    let general = |op_mod| Mailbox::new(Opcode::QUERY_HCA_CAP).set(command::OP_MOD, op_mod).0;
    // Not without a context of DevX.
    let input = general(1);
    let attrs = [(0x1000, Attr::Bytes(&input)), (0x1001, Attr::Room(cap::ANSWER))];
    assert_eq!(method(&context, OTHER.0, OTHER.1, &attrs).0, Err(Errno::INVAL));
    context.devx.grant();
    let (done, caps) = run(&context, OTHER, None, &input, cap::ANSWER);
    done.unwrap();
    assert_eq!((cap::LOG_MAX_QP_SZ.get(&caps), cap::LOG_MAX_CQ_SZ.get(&caps)), (15, 22));
    let longest = (cap::MAX_WQE_SZ_SQ.get(&caps), cap::MAX_WQE_SZ_RQ.get(&caps));
    assert_eq!((longest, cap::RC.get(&caps), cap::PORT_TYPE.get(&caps)), ((1024, 512), 1, 1));
    let (_, roce) = run(&context, OTHER, None, &general(9), cap::ANSWER);
    let ports = (roce_cap::MIN_SRC_UDP_PORT.get(&roce), roce_cap::MAX_SRC_UDP_PORT.get(&roce));
    assert_eq!((roce_cap::ADDRESS_TABLE_SIZE.get(&roce), ports), (16, (0xc000, 0xffff)));
    // UCX takes queues of DevX at 30, and 1.13 is then wrong without mkeys of its own.
    assert_eq!(cap::LOG_MAX_MSG.get(&caps), 0);
    let (_, caps) = run(&context, OTHER, None, &general(7), cap::ANSWER);
    assert_eq!((atomic_cap::OPERATIONS.get(&caps), atomic_cap::SIZE_QP.get(&caps)), (0xf, 12));
    assert_eq!(run(&context, OTHER, None, &general(1), 16).0, Err(Status::BAD_OUTPUT_LEN));
    let roce = |index| {
        let input = Mailbox::new(Opcode::QUERY_ROCE_ADDRESS).set(query_roce_address::INDEX, index);
        run(&context, OTHER, None, &input.0, query_roce_address::ANSWER)
    };
    let (_, entry) = roce(3);
    let (gid, _) = context.hca.port.gid(3).unwrap();
    assert_eq!(entry[16..32], gid.0);
    assert_eq!(
        (query_roce_address::ROCE_VERSION.get(&entry), query_roce_address::ROCE_L3_TYPE.get(&entry)),
        (2, 0)
    );
    assert_eq!(roce(99).0, Err(Status::BAD_INDEX));
    let eqn = |vector| {
        let attrs = [(0x1000, Attr::Value(vector)), (0x1001, Attr::Room(4))];
        method(&context, abi::MLX5_IB_OBJECT_DEVX, abi::MLX5_IB_METHOD_DEVX_QUERY_EQN, &attrs)
    };
    assert_eq!(eqn(1).2, (EQN + 1).to_ne_bytes());
    assert_eq!(eqn(u64::from(VECTORS)).0, Err(Errno::NOENT));
}

#[test]
fn events_come_as_cookies_and_end_with_their_object() {
    let bench = Bench::new();
    let object = abi::MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD;
    let alloc = abi::MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC;
    let flags = |flags| {
        method(&bench.context, object, alloc, &[(0x1000, Attr::Value(0)), (0x1001, Attr::Value(flags))])
    };
    assert_eq!(flags(0).0, Err(Errno::OPNOTSUPP), "with the data of events");
    let fd = flags(OMIT_DATA).1[0];
    // SAFETY: the context gave it to the program, which is this test.
    let events = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) };
    rustix::io::ioctl_fionbio(&events, true).unwrap();
    let cq = bench.create(&bench.cq()).unwrap();
    let qp = bench.create(&bench.qp(cq.1)).unwrap();
    // A duplicate is as good.
    let duplicate = i32::MAX;
    bench.context.duplicate_channel(i32::try_from(fd).unwrap(), duplicate);
    let subscribe = |object: u64, kinds: &[u8], cookie| {
        let fd = u64::from(duplicate.cast_unsigned());
        let attrs = [
            (abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE, Attr::Value(fd)),
            (abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE, Attr::Value(object)),
            (abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE, Attr::Value(cookie)),
            (abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST, Attr::Bytes(kinds)),
        ];
        method(&bench.context, OTHER.0, abi::MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT, &attrs).0
    };
    assert_eq!(
        subscribe(qp.0, &event::COMP.to_ne_bytes(), 1),
        Err(Errno::INVAL),
        "queue pairs complete nothing"
    );
    assert_eq!(subscribe(qp.0, &[0; 3], 1), Err(Errno::INVAL));
    assert_eq!(subscribe(1 << 40, &event::COMP.to_ne_bytes(), 1), Err(Errno::NOENT));
    subscribe(qp.0, &event::WQ_CATAS_ERROR.to_ne_bytes(), 11).unwrap();
    subscribe(cq.0, &event::CQ_ERROR.to_ne_bytes(), 12).unwrap();
    let raise = |event| gdsync_soft::AsyncEvents::raise(&*bench.context.hca.owners, event);
    let read = || {
        let mut cookie = [0; 8];
        rustix::io::read(&events, &mut cookie).map(|_| u64::from_ne_bytes(cookie))
    };
    raise(gdsync_soft::AsyncEvent::QpAccessError(qp.1));
    raise(gdsync_soft::AsyncEvent::QpFatal(qp.1));
    assert_eq!(read(), Ok(11), "only what was subscribed");
    raise(gdsync_soft::AsyncEvent::QpFatal(qp.1));
    raise(gdsync_soft::AsyncEvent::CqError(cq.1));
    destroy(&bench.context, qp.0).unwrap();
    assert_eq!(read(), Ok(12));
    assert_eq!(read(), Err(Errno::AGAIN));
    // The channel ends the subscriptions, with its last descriptor.
    bench.context.close_channel(i32::try_from(fd).unwrap());
    raise(gdsync_soft::AsyncEvent::CqError(cq.1));
    assert_eq!(read(), Ok(12));
    bench.context.close_channel(duplicate);
    raise(gdsync_soft::AsyncEvent::CqError(cq.1));
    assert_eq!(rustix::io::read(&events, &mut [0; 8]), Ok(0), "nobody writes to it any more");
}

#[test]
fn any_mailbox_is_no_harm() {
    let bench = Bench::new();
    let cq = bench.create(&bench.cq()).unwrap();
    let qp = bench.create(&bench.qp(cq.1)).unwrap();
    let bench = AssertUnwindSafe(bench);
    const OPCODES: [Opcode; 14] = [
        Opcode::QUERY_HCA_CAP,
        Opcode::QUERY_LAG,
        Opcode::QUERY_ROCE_ADDRESS,
        Opcode::QUERY_QP,
        Opcode::QUERY_CQ,
        Opcode::CREATE_CQ,
        Opcode::CREATE_QP,
        Opcode::CREATE_RMP,
        Opcode::RST2INIT_QP,
        Opcode::INIT2INIT_QP,
        Opcode::INIT2RTR_QP,
        Opcode::RTR2RTS_QP,
        Opcode::TO_RST_QP,
        Opcode(0x1234),
    ];
    type Case = (u8, u8, u16, Vec<(u16, u8)>, u16);
    check!().with_type::<Case>().for_each(|(method, opcode, room, bytes, len)| {
        let opcode = OPCODES[usize::from(*opcode) % OPCODES.len()];
        // A valid command with any bytes changed.
        let mut mailbox = match opcode {
            Opcode::CREATE_CQ => bench.cq(),
            Opcode::CREATE_QP => bench.qp(cq.1),
            Opcode::CREATE_RMP => bench.rmp(),
            _ => Mailbox::new(opcode).set(command::NUMBER, qp.1),
        };
        for &(at, byte) in bytes {
            let at = usize::from(at) % mailbox.0.len();
            mailbox.0[at] = byte;
        }
        mailbox.0.truncate(if len % 2 == 0 { mailbox.0.len() } else { usize::from(*len) % 300 });
        let (method, handle) = [(CREATE, None), (MODIFY, Some(qp.0)), (QUERY, Some(qp.0)), (OTHER, None)]
            [usize::from(*method) % 4];
        let room = usize::from(*room) % (cap::ANSWER + 1);
        if method == CREATE {
            if let Ok((handle, _)) = bench.create(&mailbox) {
                destroy(&bench.context, handle).unwrap();
            }
        } else {
            let mut response = Response::new(room);
            let objects = &bench.context.devx.objects;
            let object = objects.get(u32::try_from(handle.unwrap_or(qp.0)).unwrap()).unwrap();
            let input = &mailbox.0;
            if firmware::check_lengths(input, &response).is_ok() {
                _ = match method {
                    MODIFY => bench.context.modify_object(&object, input),
                    QUERY => object.query(bench.context.hca, input, &mut response),
                    _ => bench.context.general(input, &mut response),
                };
            }
        }
        close_channels(&bench.context);
    });
}

#[test]
fn any_attributes_are_no_harm() {
    let context = open();
    context.devx.grant();
    let context = AssertUnwindSafe(context);
    const OBJECTS: [u16; 5] = [
        abi::MLX5_IB_OBJECT_DEVX,
        abi::MLX5_IB_OBJECT_DEVX_OBJ,
        abi::MLX5_IB_OBJECT_DEVX_UMEM,
        abi::MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD,
        abi::MLX5_IB_OBJECT_UAR,
    ];
    type Case = (u8, u8, Vec<(u8, Option<u16>, u64)>);
    check!().with_type::<Case>().for_each(|(object, number, attrs)| {
        let object = OBJECTS[usize::from(*object) % OBJECTS.len()];
        let attrs: Vec<_> = attrs
            .iter()
            .take(8)
            .map(|&(id, room, value)| {
                let attr = room.map_or(Attr::Value(value), |room| Attr::Room(usize::from(room) % 512));
                (0x1000 + u16::from(id % 8), attr)
            })
            .collect();
        _ = method(&context, object, 0x1000 + u16::from(number % 6), &attrs);
        close_channels(&context);
    });
}
