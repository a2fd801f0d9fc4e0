//! `gdasync card` runs programs on the emulated card, as they are.

use super::common::{command, run};

/// Whether rdma-core is installed. Says so if it is not.
pub(crate) fn has_rdma_core() -> bool {
    let (output, _, error) = run(command("gdasync card true"));
    if !output.status.success() {
        assert!(error.contains("is not installed") && error.contains("install the package"), "{error}");
        eprintln!("skipped: {error}");
    }
    output.status.success()
}

#[test]
fn programs_run_on_the_card_of_the_chosen_kind() {
    if !has_rdma_core() {
        return;
    }
    for (options, layer) in
        [("", "Ethernet"), ("--link eth", "Ethernet"), ("--link ib --devices 2", "InfiniBand")]
    {
        let line = format!("gdasync card {options} cat /sys/class/infiniband/mlx5_0/ports/1/link_layer");
        let (output, text, error) = run(command(&line));
        assert!(output.status.success(), "{error}");
        assert_eq!(text, format!("{layer}\n"), "{line}");
    }
    let (_, text, error) = run(command("gdasync card --devices 2 ls /sys/class/infiniband"));
    assert_eq!(text, "mlx5_0\nmlx5_1\n", "{error}");
}

/// A program says only that it cannot open the device.
#[test]
fn variables_that_are_wrong_are_told_on_standard_error() {
    if !has_rdma_core() {
        return;
    }
    for (name, value) in [("GDASYNC_CARD_MODES", "blah"), ("GDSYNC_FAULTS", "blah=1")] {
        let mut card = command("gdasync card cat /sys/class/infiniband/mlx5_0/ports/1/gids/0");
        card.env(name, value).env_remove("GDASYNC_CARD_LOG");
        let (output, _, error) = run(card);
        assert!(!output.status.success());
        let told = format!("the software HCA does not start: {name} is '{value}'");
        assert_eq!(error.matches(&told).count(), 1, "{error}");
    }
}

#[test]
fn the_exit_status_is_that_of_the_program() {
    if !has_rdma_core() {
        return;
    }
    assert_eq!(run(command("gdasync card false")).0.status.code(), Some(1));
    let (output, _, error) = run(command("gdasync card /no/such/program --help"));
    assert_eq!(output.status.code(), Some(127));
    assert!(error.contains("/no/such/program: No such file"), "{error}");
}

#[test]
fn a_path_that_cannot_be_preloaded_is_an_error() {
    if !has_rdma_core() {
        return;
    }
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_gdasync"));
    let dir = binary.with_file_name(format!("gdasync card {}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    // A copy that is still open for writing in a child of another thread cannot be run.
    std::fs::hard_link(binary, dir.join("gdasync")).unwrap();
    std::fs::write(dir.join("libgdasync_card.so"), "").unwrap();
    let mut card = std::process::Command::new(dir.join("gdasync"));
    card.args(["card", "true"]);
    let (output, _, error) = run(card);
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(!output.status.success());
    assert!(error.contains("blank or colon") && error.contains("another directory"), "{error}");
}
