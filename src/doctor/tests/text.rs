//! The report for people.

use super::super::areas::topology::pairs;
use super::super::output;
use super::super::{Description, Report};
use super::rig::{all, healthy};
use super::tree::{BRIDGES, Tree};

fn text(tree: &Tree, verbose: bool) -> String {
    let machine = healthy(tree);
    let report = Report { machine: Description::here(), probes: all(&machine), topology: pairs(&machine) };
    let mut out = Vec::new();
    output::text(&mut out, &report, verbose).unwrap();
    String::from_utf8(out).unwrap()
}

/// Words with the spaces of columns between them.
fn has(text: &str, words: &str) -> bool {
    text.lines().any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").contains(words))
}

#[test]
fn devices_that_say_the_same_share_a_line() {
    let tree = Tree::healthy();
    let text = text(&tree, false);
    assert!(has(&text, "ok gpu.memop_run GPU 0, GPU 1: ran"), "{text}");
    assert!(has(&text, "ok rdma.devx mlx5_0, mlx5_1: allowed to this user"), "{text}");
    assert!(!text.contains("why:") && !text.contains("fix:"), "{text}");
    assert!(text.contains(" ok, 0 warn, 0 fail, 1 skip"), "{text}");
}

#[test]
fn paths_are_a_matrix() {
    let text = text(&Tree::healthy(), false);
    for row in ["GPU0 X NV PIX SYS", "GPU1 NV X SYS PIX", "mlx5_0 PIX SYS X SYS", "mlx5_1 SYS PIX SYS X"] {
        assert!(has(&text, row), "{row}: {text}");
    }
}

#[test]
fn what_is_wrong_comes_with_the_reason_and_the_fix() {
    let tree = Tree::healthy();
    tree.bridge(BRIDGES[0], 0x1c);
    tree.remove("dev/nvidia-uvm");
    let text = text(&tree, false);
    for words in [
        "FAIL driver.nodes missing: /dev/nvidia-uvm",
        "why: CUDA reaches the driver through these files",
        "fix: run `nvidia-modprobe -u -c 0`",
        "warn iommu.acs requests are redirected by 0000:00:01.0",
        "fix: switch ACS off",
    ] {
        assert!(has(&text, words), "{words}: {text}");
    }
    assert!(text.contains(" ok, 1 warn, 1 fail, 1 skip"), "{text}");
    assert!(super::text::text(&tree, true).contains("tried: getrlimit"), "verbose says what was tried");
}
