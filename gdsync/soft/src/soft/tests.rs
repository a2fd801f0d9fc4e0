//! Tests that hold the lock of one HCA while its peer acts.

use super::*;
use gdsync::verbs::{Context, RecvWr, SendWr};
use gdsync_device::copy_engine::{Handle, Part, ProcessId, Ticket};
use gdsync_device::cuda::Gpu;
use gdsync_device::engine::Progress as _;
use gdsync_device::memory::Word32;
use gdsync_shm as protocol;
use mlx5_ring::{self as mlx5, CQE_SIZE, Cqe, CqeOpcode, DataSeg, Payload, RemoteAddr, SendOp, WqeFlags};

const TIMEOUT: Duration = Duration::from_secs(20);

struct Side {
    hca: SoftHca,
    recv_cq: CqParts,
    qp: QpParts,
}

impl Side {
    fn new() -> Self {
        Self::with(&SoftHcaConfig::default())
    }

    fn with(config: &SoftHcaConfig) -> Self {
        let hca = SoftHca::start(config).unwrap();
        let (recv_cq, qp) = Self::add_qp(&hca);
        Self { hca, recv_cq, qp }
    }

    fn add_qp(hca: &SoftHca) -> (CqParts, QpParts) {
        let (send_cq, recv_cq) = (
            hca.create_cq(3, OnGpu::empty(), &Places::default()).unwrap(),
            hca.create_cq(3, OnGpu::empty(), &Places::default()).unwrap(),
        );
        let (send_cqn, recv_cqn, rq_stride) = (send_cq.cqn, recv_cq.cqn, mlx5::recv_stride(1));
        let request = QpRequest {
            pdn: 1,
            send_cqn,
            recv_cqn,
            log_sq: 3,
            log_rq: 3,
            rq_stride,
            max_send_sge: 1,
            max_inline: 64,
            qkey: None,
        };
        let qp = hca.create_qp(&request, &Places::default()).unwrap();
        (recv_cq, qp)
    }

    fn connect(&self, to: &Self) {
        let remote = to.hca.address(to.qp.qpn, to.qp.psn);
        let rtr = QpAttr::to(QpState::RTR).remote(remote).path_mtu(1024).max_dest_rd_atomic(1);
        let rts = QpAttr::to(QpState::RTS).timeout(14).retry_cnt(7).rnr_retry(6).max_rd_atomic(1);
        let init = QpAttr::to(QpState::INIT).access(Access::all());
        for attr in [init, rtr.min_rnr_timer(1), rts] {
            self.hca.modify_qp(self.qp.qpn, &attr, TIMEOUT).unwrap();
        }
    }

    /// Posts a SEND of no bytes.
    fn send(&self) {
        self.post(&SendOp::Send { payload: Payload::Sges(&[]), imm: None });
    }

    /// Posts the first send.
    fn post(&self, op: &SendOp<'_>) {
        let wqe = mlx5::encode(op, self.qp.qpn, 0, WqeFlags::default()).unwrap();
        self.qp.sq.write(0, wqe.as_bytes()).unwrap();
        let record = self.qp.record.atomic32(mlx5::QP_DBREC_SEND).unwrap();
        let doorbell = mlx5::doorbell_word(wqe.first8());
        protocol::ring_doorbell(record, mlx5::send_record(1), || {}, self.qp.doorbell.atomic(), doorbell);
        self.hca.ring(self.qp.qpn);
    }
}

/// Serializes the tests that count or create many links.
static LINKS: Mutex<()> = Mutex::new(());

/// Mappings of links in this process.
fn mapped_links() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:gdsync-link")).count()
}

/// Peers come and go, as under a scheduler.
#[test]
fn links_to_departed_peers_are_reused() {
    let _alone = LINKS.lock();
    let a = Side::new();
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < TIMEOUT, "{what}");
            std::thread::yield_now();
        }
    };
    let (mut most, mut places) = (0, 0);
    for n in 0..300u64 {
        let b = Side::new();
        a.connect(&b);
        b.connect(&a);
        // Posted again: the reset cleared the ring.
        a.qp.rq.write(0, &[0; 16]).unwrap();
        a.qp.record.atomic32(mlx5::QP_DBREC_RECV).unwrap().store(mlx5::recv_record(1), Ordering::Release);
        b.send();
        let slot = usize::try_from(n % 8).unwrap() * CQE_SIZE;
        let word = a.recv_cq.ring.atomic32(slot + mlx5::CQE_OP_OWN_OFFSET).unwrap();
        until("the message is here", &|| protocol::is_complete(word, n, 3));
        protocol::free_slots(a.recv_cq.record.atomic32(0).unwrap(), n + 1);
        let mut cqe = [0; CQE_SIZE];
        a.recv_cq.ring.read(slot, &mut cqe).unwrap();
        assert_eq!(Cqe::decode(&cqe).opcode, CqeOpcode::RESP_SEND, "peer {n}");
        let reset = QpAttr::to(QpState::RESET);
        // Alternates between a reset before the peer leaves and after.
        if n % 2 == 0 {
            a.hca.modify_qp(a.qp.qpn, &reset, TIMEOUT).unwrap();
        }
        drop(b);
        if n % 2 == 1 {
            let is_lost =
                || a.hca.shared.with(|core| core.with_qp(a.qp.qpn, |qp, _| qp.state == QpState::ERR));
            until("the queue pair fails", &|| is_lost() == Some(true));
            assert!(a.hca.shared.core.lock().count_links().0 > 1, "a link in use was freed");
            a.hca.modify_qp(a.qp.qpn, &reset, TIMEOUT).unwrap();
        }
        until("the link is freed", &|| a.hca.shared.with(|core| core.count_links().0) == 1);
        let (_, numbers) = a.hca.shared.core.lock().count_links();
        (most, places) = (most.max(numbers), places.max(mapped_links()));
    }
    // Other tests of this process have up to 128 at the same time; one left of each peer would be 300.
    assert!(most <= 4 && places < 250, "{most} numbers, {places} mapped at a time");
}

/// Idle links must show no packets.
#[test]
fn idle_links_of_300_peers_show_no_packets() {
    let _alone = LINKS.lock();
    let hub = Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap());
    let build = |context: &Context| context.alloc_pd().unwrap().build_qp().build().unwrap();
    let hub_context = Context::over(hub.clone());
    let pairs: Vec<_> = (0..300)
        .map(|_| {
            let peer = Context::over(Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap()));
            let (here, there) = (build(&hub_context), build(&peer));
            here.connect(there.address()).unwrap();
            there.connect(here.address()).unwrap();
            (here, there)
        })
        .collect();
    assert!(hub.shared.core.lock().count_links().0 > 300);
    for (n, (here, there)) in pairs.iter().enumerate().rev() {
        here.post_recv(&[RecvWr::new(&[]).id(n as u64)]).unwrap();
        there.post_send(&[SendWr::send(&[])]).unwrap();
        assert_eq!(here.recv_cq().wait(TIMEOUT).unwrap().ok().unwrap().wr_id, n as u64);
        there.send_cq().wait(TIMEOUT).unwrap().ok().unwrap();
    }
    let start = Instant::now();
    while hub.shared.rx_hints.any() {
        assert!(start.elapsed() < TIMEOUT, "hints report packets on empty rings");
        std::thread::yield_now();
    }
}

#[test]
fn packets_sent_before_peer_death_are_received() {
    let (a, b) = (Side::new(), Side::new());
    a.connect(&b);
    b.connect(&a);
    a.qp.rq.write(0, &[0; 16]).unwrap();
    let record = a.qp.record.atomic32(mlx5::QP_DBREC_RECV).unwrap();
    record.store(mlx5::recv_record(1), Ordering::Release);
    // Holding the lock stops this HCA while the peer sends and dies.
    let mut core = a.hca.shared.core.lock();
    a.hca.shared.accept(&mut core);
    b.send();
    let start = Instant::now();
    // The send is delayed if another thread was stepping that HCA.
    while b.hca.stats().packets_sent == 0 {
        assert!(start.elapsed() < TIMEOUT, "nothing was sent");
        std::thread::yield_now();
    }
    drop(b);
    let link = core.newest_link();
    while !core.is_newly_dead(link) {
        assert!(start.elapsed() < TIMEOUT, "the peer's death was not noticed");
        std::thread::yield_now();
    }
    // The peer may have opened a second link and used that one.
    a.hca.shared.accept(&mut core);
    core.tick(Instant::now());
    while core.step(&a.hca.shared.doorbells) {}
    let mut cqe = [0; CQE_SIZE];
    a.recv_cq.ring.read(0, &mut cqe).unwrap();
    assert_eq!(Cqe::decode(&cqe).opcode, CqeOpcode::RESP_SEND);
}

#[test]
fn a_peer_that_gets_no_processor_is_not_given_up() {
    let contexts = [(); 2].map(|()| Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap()));
    let build = |hca: &Arc<SoftHca>| {
        let pd = Context::over(hca.clone()).alloc_pd().unwrap();
        pd.build_qp().timeout(1).retry_cnt(1).build().unwrap()
    };
    for peer in &contexts {
        let (a, b) = (build(&contexts[0]), build(peer));
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        b.post_recv(&[RecvWr::new(&[])]).unwrap();
        peer.shared.with(|_| {
            a.post_send(&[SendWr::send(&[])]).unwrap();
            // Many times the patience of the queue pair: 8 us, twice.
            std::thread::sleep(Duration::from_millis(20));
        });
        a.send_cq().wait(TIMEOUT).unwrap().ok().unwrap();
    }
}

#[test]
fn what_has_arrived_is_taken_before_a_timeout_counts() {
    let (a, b) = (Side::new(), Side::new());
    a.connect(&b);
    b.connect(&a);
    let start = Instant::now();
    let until = |done: &mut dyn FnMut() -> bool| {
        while !done() {
            assert!(start.elapsed() < TIMEOUT);
            std::thread::yield_now();
        }
    };
    let stopped = b.hca.shared.core.lock();
    a.send();
    until(&mut || a.hca.stats().packets_sent > 0);
    let mut core = a.hca.shared.core.lock();
    b.hca.shared.unlock(stopped);
    until(&mut || {
        // The peer may have opened a second link and used that one.
        a.hca.shared.accept(&mut core);
        core.has_arrivals()
    });
    // The first call may only set the timer.
    for late in [0, 1] {
        core.tick(Instant::now() + late * TIMEOUT);
    }
    assert_eq!(core.stats.retransmissions, 0);
}

/// Reports copies as done without copying.
#[derive(Debug)]
struct Idle;

impl CopyEngine for Idle {
    fn adopt(&self, _: &Gpu) {}
    fn export(&self, _: &Memory) -> Option<Handle> {
        Some(Handle { ipc: [0; 64], buffer: 0, offset: 0 })
    }
    fn stages(&self, _: &Memory) -> bool {
        false
    }
    fn start(&self, _: Vec<Part>) -> Ticket {
        let ticket = Ticket::default();
        ticket.done();
        ticket
    }
    fn forget(&self, _: ProcessId) {}
}

#[test]
fn both_sides_record_the_start_of_a_copy() {
    const LEN: usize = 4096;
    let config =
        SoftHcaConfig { by_reference: LEN, copy_engine: Some(Arc::new(Idle)), ..SoftHcaConfig::default() };
    let (a, b) = (Side::with(&config), Side::with(&config));
    a.connect(&b);
    b.connect(&a);
    let memory = Memory::alloc(LEN).unwrap();
    let [own, other] = [&a, &b].map(|side| side.hca.reg_mr(1, &memory, Access::all()).unwrap());
    let began = |side: &Side| side.hca.shared.progress.copied.when();
    assert_eq!((began(&a), began(&b)), (None, None));
    let start = Instant::now();
    let sges = [DataSeg { addr: memory.addr(), len: u32::try_from(LEN).unwrap(), lkey: own.lkey }];
    let remote = RemoteAddr { addr: memory.addr(), rkey: other.rkey };
    a.post(&SendOp::Write { remote, payload: Payload::Sges(&sges), imm: None });
    while b.hca.stats().by_reference == 0 {
        assert!(start.elapsed() < TIMEOUT, "nothing was sent by reference");
        std::thread::yield_now();
    }
    // The time is published when the lock is released, which it was since.
    assert!(began(&b) >= Some(start), "{:?}", began(&b));
    assert!(a.hca.stats().packets_sent > 0 && began(&a) >= Some(start), "{:?}", began(&a));
}

#[test]
fn copies_make_waiters_poll() {
    let hca = Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap());
    assert!(!hca.has_copied_recently(), "there was no copy");
    // In the future, so that it counts as recent on a slow machine.
    hca.shared.progress.copied.set(Instant::now() + TIMEOUT);
    assert!(hca.has_copied_recently());
}

/// Nobody may wait for a state that no step will change.
#[test]
fn panic_in_a_step_breaks_queue_pairs_and_streams() {
    let hca = Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap());
    let context = Context::over(hca.clone());
    let pd = context.alloc_pd().unwrap();
    let build = || pd.build_qp().build().unwrap();
    let (a, b) = (build(), build());
    a.connect(b.address()).unwrap();
    b.connect(a.address()).unwrap();
    let there = Context::over(Arc::new(SoftHca::start(&SoftHcaConfig::default()).unwrap()));
    let (peer, c) = (there.alloc_pd().unwrap().build_qp().rnr_retry(7).build().unwrap(), build());
    peer.connect(c.address()).unwrap();
    c.connect(peer.address()).unwrap();
    let unanswered = peer.post_send(&[SendWr::send(&[])]).unwrap();
    let [by_cpu, by_stream] = [(); 2].map(|()| b.post_recv(&[RecvWr::new(&[])]).unwrap());
    let stream = gdsync::stream::Stream::host(gdsync::stream::HostStreamConfig::default()).unwrap();
    stream.wait(&by_cpu).unwrap();
    stream.wait(&by_stream).unwrap();
    let waiter = std::thread::spawn(move || by_cpu.wait(LONG));
    hca.shared.with(|core| core.panics = true);
    // The panic, or the flush that follows when the stream stops the queue pair.
    assert!(waiter.join().unwrap().map_or(true, |wc| wc.syndrome.is_some()));
    assert!(matches!(stream.synchronize(LONG), Err(gdsync_device::Error::Panicked { .. })));
    assert!(matches!(a.check(), Err(gdsync_device::Error::Panicked { .. })));
    assert!(pd.build_qp().build().is_err());
    assert!(matches!(unanswered.wait(TIMEOUT), Err(gdsync_device::Error::Completion(_))));
}

/// Never reached.
const LONG: Duration = Duration::from_secs(3600);

fn begun(word: &Word32, value: u32) -> Ticket {
    let ticket = Ticket::default();
    assert!(ticket.begin());
    ticket.done_at(word.clone(), value);
    ticket
}

/// Result of [`StuckCopies::wait`], which must return at once.
fn wait_returns_at_once(stuck_copies: &StuckCopies, copies: &[Ticket]) -> bool {
    let (result, results) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| result.send(stuck_copies.wait(copies, Instant::now() + LONG)).unwrap());
        let over = results.recv_timeout(Duration::from_secs(20));
        if over.is_err() {
            // Ends the waiting thread.
            copies.iter().for_each(|copy| copy.fail("the test has failed"));
        }
        over.expect("waited again for a stuck copy")
    })
}

#[test]
fn stuck_copies_are_waited_for_only_once() {
    let memory = Memory::alloc(8).unwrap();
    let [hung, other] = [0, 4].map(|at| memory.word32(at).unwrap());
    let stuck_copies = StuckCopies::default();
    let copies = [u32::MAX, 0, 1].map(|value| begun(&hung, value));
    hung.store(u32::MAX - 1);
    assert!(!stuck_copies.wait(&copies[1..2], Instant::now()));
    assert!(!wait_returns_at_once(&stuck_copies, &copies[1..]), "the same, and one behind it");
    // Copies ahead of it or on another GPU are waited for.
    let works = [copies[0].clone(), begun(&other, 1)];
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let all = [&copies[1..2], &works].concat();
            stuck_copies.wait(&all, Instant::now() + LONG)
        });
        std::thread::yield_now();
        hung.store(u32::MAX);
        other.store(1);
        assert!(!waiting.join().unwrap());
    });
    assert!(works.iter().all(Ticket::is_over));
    // The stuck copy resumes.
    hung.store(0);
    assert!(!stuck_copies.wait(&copies[2..], Instant::now()));
    hung.store(1);
    assert!(stuck_copies.wait(&copies, Instant::now()));
}

/// An HCA over TCP, and ports that connect to it.
fn hub(ports: usize) -> (Side, Vec<TcpPort>) {
    let here = std::net::Ipv4Addr::LOCALHOST.into();
    let hub = Side::with(&SoftHcaConfig { tcp: Some(here), ..SoftHcaConfig::default() });
    (hub, (0..ports).map(|_| TcpPort::open(here, None).unwrap()).collect())
}

#[test]
fn peers_that_do_not_close_their_links_hold_up_the_end_once() {
    const PEERS: usize = 50;
    let (hub, ports) = hub(PEERS);
    let _links: Vec<_> =
        ports.iter().map(|port| port.connect(hub.hca.shared.own, TIMEOUT).unwrap()).collect();
    let start = Instant::now();
    while hub.hca.shared.with(|core| core.count_links().0) <= PEERS {
        assert!(start.elapsed() < TIMEOUT, "links are taken");
        std::thread::yield_now();
    }
    let start = Instant::now();
    drop(hub);
    // 200 ms each would be twice as much.
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// Its old queue pairs fail, and not those over its new link.
#[test]
fn a_peer_that_connects_again_before_its_end_was_seen_keeps_its_new_link() {
    let (hub, ports) = hub(1);
    let (port, shared) = (&ports[0], &hub.hca.shared);
    let (_cq, second) = Side::add_qp(&hub.hca);
    let second = second.qpn;
    let Peer { gid, port: lid } = port.own();
    let init = QpAttr::to(QpState::INIT).access(Access::all());
    let rtr = QpAttr::to(QpState::RTR).path_mtu(1024).max_dest_rd_atomic(1).min_rnr_timer(1);
    let rtr = rtr.remote(QpAddress::new(gid, 0x123, 1).with_lid(lid));
    hub.hca.modify_qp(hub.qp.qpn, &init, TIMEOUT).unwrap();
    hub.hca.modify_qp(second, &init, TIMEOUT).unwrap();
    let first = port.connect(shared.own, TIMEOUT).unwrap().expect("the only link");
    hub.hca.modify_qp(hub.qp.qpn, &rtr, TIMEOUT).unwrap();
    let mut core = shared.core.lock();
    drop(first);
    let start = Instant::now();
    // It sees the end, and does not act.
    while !core.has_arrivals() {
        assert!(start.elapsed() < TIMEOUT, "the end of the connection");
    }
    let _again = port.connect(shared.own, TIMEOUT).unwrap().expect("the old one has ended");
    // The peer may know of the link a moment before it can be taken.
    let link = loop {
        assert!(start.elapsed() < TIMEOUT, "the new connection is not accepted");
        shared.accept(&mut core);
        if let Some(link) = core.link_to(port.own()) {
            break link;
        }
    };
    let linked = core.with_qp(second, |qp, env| qp.modify(&rtr, Some((port.own(), Some(link))), env));
    linked.unwrap().unwrap();
    core.tick(Instant::now());
    let state = |core: &mut Core, qpn| core.with_qp(qpn, |qp, _| qp.state).unwrap();
    assert_eq!([hub.qp.qpn, second].map(|qpn| state(&mut core, qpn)), [QpState::ERR, QpState::RTR]);
}
