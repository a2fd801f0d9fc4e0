//! C programs that check themselves, as two ranks.

use gdsync_testkit::card;
use gdsync_testkit::process::printed;

use crate::{Hca, PACKAGE, Program, has_verbs_header};

#[test]
fn ranks_exchange_messages_in_every_way() {
    let program = Program::compile("messages");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let launcher = [("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    let lossy = [("GDSYNC_FAULTS", "seed=1,drop=0.01,duplicate=0.01")];
    let said = program.passes(Hca::Soft, &lossy) + &program.passes(Hca::Soft, &launcher);
    assert!(said.is_empty(), "{said}");
    let said = PACKAGE.finish(program.command(Hca::Soft).env("MP_ENABLE_UD", "1"));
    assert!(
        said.status.success() && printed(&said).contains("reliable also with MP_ENABLE_UD"),
        "{}",
        printed(&said)
    );
    // The CPU does not reach the memory of a simulated GPU. MP_INIT_RX_CQ_ON_GPU
    let said = program.passes(Hca::Soft, &[("INIT_FLAGS", "2")]);
    assert!(
        said.lines().all(|line| line.starts_with("mp: mp_init: the queues are in host memory: ")),
        "{said}"
    );
    assert!(!said.is_empty());
    if card::has_rdma_core() {
        let links = [[("GDASYNC_CARD_LINK", "eth")], [("GDASYNC_CARD_LINK", "ib")]];
        let said: String = links.iter().map(|link| program.passes(Hca::Card, link)).collect();
        assert!(said.is_empty(), "{said}");
    }
}

#[test]
fn misuse_has_an_error_number_and_a_line() {
    let program = Program::compile("misuse");
    for hca in [Hca::Soft, Hca::Card] {
        if hca == Hca::Card && !card::has_rdma_core() {
            continue;
        }
        let log = program.passes(hca, &[]);
        assert!(log.lines().count() > 150, "{log}");
        for line in log.lines() {
            assert!(line.starts_with("mp: mp"), "{line}");
        }
        assert!(!log.contains("panicked"), "{log}");
        let line = "mp: mp_wait: rank 1: ";
        assert!(log.contains(line), "{log}");
    }
}

#[test]
fn ranks_tell_each_other_when_they_are_ready() {
    let program = Program::compile("comm");
    let mut said = program.passes(Hca::Soft, &[]);
    if card::has_rdma_core() {
        said += &program.passes(Hca::Card, &[]);
    }
    // Two misuses of each rank, and a wait that is late, on purpose.
    let expected = |line: &str| line.contains("no such peer") || line.contains("mp_wait32: ");
    assert!(said.lines().count().is_multiple_of(5) && said.lines().all(expected), "{said}");
}

#[test]
fn the_example_plays_ping_pong_on_streams() {
    let program = Program::of("pingpong", "../../examples/c/pingpong_mp.c", &["-DMP_NO_MPI"]);
    let said = PACKAGE.job(2, || program.command(Hca::Soft));
    assert!(said[0].starts_with("1000 rounds of 4096 bytes, ") && said[1].is_empty(), "{said:?}");
}

#[test]
fn lanes_of_a_kernel_signal_in_any_order() {
    if !has_verbs_header() {
        return;
    }
    let directory = PACKAGE.linked_with_cuda("lanes");
    let compiler = PACKAGE.compiler("g++", &["-std=c++11"]);
    PACKAGE.compile(compiler, &["tests/c/lanes.cpp"], &directory, &["-lmp", "-lcuda"]);
    let output = PACKAGE.finish(&mut PACKAGE.program(&directory, &[]));
    assert!(output.status.success(), "{}", printed(&output));
}
