//! The Jacobi example, run as its users run it.

use std::process::Command;

use super::common::{Scratch, example, fails, positive, run, succeeds};

fn jacobi(args: &[&str]) -> Command {
    let mut command = example("jacobi2d");
    command.args(args);
    command
}

const MODES: [&str; 3] = ["stream", "graph", "sync"];

/// Any number of ranks, rows that do not divide evenly, windows that do not divide the iterations.
#[test]
fn blocks_give_the_bits_of_the_whole() {
    for mode in MODES {
        for (ranks, nx, ny) in [(1, 7, 5), (2, 33, 20), (3, 17, 10), (3, 5, 3), (5, 1, 9)] {
            let json = Scratch::new(&format!("jacobi-{mode}-{ranks}-{nx}"));
            let sizes = [ranks, nx, ny].map(|number: u32| number.to_string());
            let out = succeeds(jacobi(&[
                "--mode",
                mode,
                "--ranks",
                &sizes[0],
                "--nx",
                &sizes[1],
                "--ny",
                &sizes[2],
                "--iters",
                "43",
                "--ahead",
                "8",
                "--json",
                json.path().to_str().unwrap(),
            ]));
            assert!(out.contains("difference to one process: at most 0e0, 0 cells"), "{out}");
            let report = json.json();
            assert_eq!(report["ranks"], ranks);
            assert_eq!(report["mode"], mode);
            assert_eq!(report["stream"], "host");
            assert_eq!((&report["iters"], &report["timed"]), (&43.into(), &39.into()));
            assert_eq!(report["halo_bytes"], 2 * (ranks - 1) * nx * 8);
            assert_eq!(report["max_difference"], 0.0);
            assert_eq!(report["different_cells"], 0);
            positive(&report["iteration_us"]);
            positive(&report["cells_per_s"]);
        }
    }
}

#[test]
fn lost_halo_rows_are_noticed() {
    for mode in MODES {
        for iteration in ["3", "19"] {
            let args = ["--ranks", "3", "--nx", "9", "--ny", "9", "--iters", "20", "--mode", mode];
            let (output, out, err) = run(jacobi(&[&args[..], &["--lose", iteration]].concat()));
            // The rows of the last iteration are not used any more.
            if iteration == "19" {
                assert!(output.status.success(), "{out}{err}");
                continue;
            }
            assert_eq!(output.status.code(), Some(1), "{out}{err}");
            assert!(err.contains("not that of one process"), "{err}");
            assert!(out.contains("difference to one process") && !out.contains(", 0 cells"), "{out}");
        }
    }
}

#[test]
fn faults_of_the_network_cost_time_but_no_bits() {
    for mode in MODES {
        let mut command =
            jacobi(&["--ranks", "2", "--nx", "700", "--ny", "8", "--iters", "20", "--mode", mode]);
        command.env("GDSYNC_FAULTS", "drop=0.02,seed=1");
        succeeds(command);
    }
}

#[test]
fn strict_rings_are_kept() {
    let mut command = jacobi(&["--ranks", "2", "--nx", "50", "--ny", "50", "--iters", "20"]);
    command.env("GDSYNC_STRICT", "1");
    succeeds(command);
}

#[test]
fn what_is_not_compared_is_said() {
    let json = Scratch::new("jacobi-unchecked");
    let path = json.path().to_str().unwrap();
    let out = succeeds(jacobi(&["--nx", "8", "--ny", "8", "--iters", "5", "--no-check", "--json", path]));
    assert!(out.contains("not compared"), "{out}");
    assert!(json.json().get("max_difference").is_none());
}

#[test]
fn bad_arguments_are_named() {
    let nowhere = "/proc/no/such/folder/results.json";
    for (args, expected) in [
        (&["--nx", "0"][..], &["--nx"][..]),
        (&["--ny", "65537"], &["--ny", "65537"]),
        (&["--iters", "0"], &["--iters"]),
        (&["--ahead", "201"], &["--ahead"]),
        (&["--ranks", "0"], &["--ranks"]),
        (&["--mode", "cpu"], &["--mode", "stream, graph, sync"]),
        (&["--ranks", "3", "--ny", "2", "--nx", "2"], &["--ny 2", "3 ranks need a row each"]),
        (&["--via", "memop"], &["--via is for --stream cuda"]),
        (&["--nx", "2", "--ny", "2", "--json", nowhere], &["--json", nowhere, "No such file"]),
    ] {
        let error = fails(jacobi(args));
        assert!(expected.iter().all(|word| error.contains(word)), "{args:?}: {error}");
    }
}

/// A launcher decides how many ranks there are.
#[test]
fn a_job_of_another_size_is_refused() {
    let mut command = jacobi(&["--ranks", "2", "--nx", "8", "--ny", "8"]);
    command.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    command.env("MASTER_PORT", port.to_string());
    let error = fails(command);
    assert!(error.contains("--ranks") && error.contains("1 ranks"), "{error}");
}
