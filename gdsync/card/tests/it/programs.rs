//! Unmodified programs find the card and move data over it.

use std::process::Child;
use std::time::{Duration, Instant};

use gdsync_testkit::process::free_port;
use gdsync_testkit::tier;

use crate::robustness::build;
use crate::{card, finish, has, library, run, start, succeeded};

/// Whether somebody listens at a port of this host.
fn is_listening(port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|local| local.ends_with(&suffix)) && words.nth(1) == Some("0A")
        })
    })
}

/// Waits until a server listens or has ended.
pub(crate) fn await_server(server: &mut Child, port: u16) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_listening(port) && server.try_wait().expect("it is a child").is_none() {
        assert!(Instant::now() < end, "the server does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs a program as a server, and again as its client. Returns what the client printed.
fn pair(program: &str, link: &str, arguments: &[&str]) -> String {
    let port = free_port();
    let number = port.to_string();
    let mut arguments = arguments.to_vec();
    arguments.extend(["-p", &number]);
    let mut server = start(card(program, link).args(&arguments));
    await_server(&mut server, port);
    let client = finish(start(card(program, link).args(&arguments).arg("127.0.0.1")));
    let server = finish(server);
    // One that fails makes the other fail or hang.
    assert!(client.status.success(), "{program}, as client: {client:?}; as server: {server:?}");
    succeeded(program, &server);
    succeeded(program, &client)
}

#[test]
fn ibv_devinfo_describes_the_device() {
    if !has("ibv_devinfo") {
        return;
    }
    let text = run("ibv_devinfo", "eth", &["-v"]);
    for line in ["hca_id:\tmlx5_0", "PORT_ACTIVE (4)", "link_layer:\t\tEthernet", "RoCE v2", "ATOMIC_HCA (1)"]
    {
        assert!(text.contains(line), "{line} is missing:\n{text}");
    }
    let text = run("ibv_devinfo", "ib", &["-v"]);
    assert!(text.contains("link_layer:\t\tInfiniBand"), "{text}");
    assert!(!text.contains("port_lid:\t\t0\n"), "{text}");
    assert!(!text.contains("AUTO_PATH_MIG"), "MODIFY_QP takes no alternate path: {text}");
    let mask = run("cat", "ib", &["/sys/class/infiniband/mlx5_0/ports/1/cap_mask"]);
    assert!(text.contains(mask.trim()), "sysfs says {mask}, QUERY_PORT says otherwise: {text}");
}

#[test]
fn two_devices_are_two() {
    if !has("ibv_devinfo") {
        return;
    }
    let output = finish(start(card("ibv_devinfo", "eth").env("GDASYNC_CARD_DEVICES", "2")));
    let text = succeeded("ibv_devinfo", &output);
    let guids: std::collections::HashSet<_> =
        text.lines().filter(|line| line.contains("node_guid")).collect();
    assert_eq!(guids.len(), 2, "{text}");
    assert!(text.contains("mlx5_1"), "{text}");
}

#[test]
fn ibv_rc_pingpong_passes() {
    if !has("ibv_rc_pingpong") {
        return;
    }
    for (link, arguments) in [
        ("eth", &["-g", "1"][..]),
        ("eth", &["-g", "3", "-e"]),
        ("ib", &[]),
        ("ib", &["-e"]),
        ("ib", &["-g", "0"]),
    ] {
        // -c: the contents are checked.
        let mut all = vec!["-c", "-n", "100"];
        all.extend(arguments);
        let text = pair("ibv_rc_pingpong", link, &all);
        assert!(text.contains("100 iters in"), "{link} {arguments:?}: {text}");
    }
}

#[test]
fn peers_on_two_links_are_told() {
    let program = "ibv_rc_pingpong";
    if !has(program) {
        return;
    }
    let port = free_port();
    let arguments = ["-g", "0", "-p", &port.to_string()];
    let mut server = start(card(program, "ib").args(arguments));
    await_server(&mut server, port);
    let client = finish(start(card(program, "eth").args(arguments).arg("127.0.0.1")));
    let server = finish(server);
    // The server connects first.
    assert!(!server.status.success() && !client.status.success());
    let said = String::from_utf8_lossy(&server.stderr);
    for words in [
        "no card on InfiniBand has the address of the peer: start both with the same --link",
        "Failed to modify QP to RTR",
    ] {
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn datagrams_and_shared_receive_queues_pass() {
    for program in ["ibv_ud_pingpong", "ibv_srq_pingpong"] {
        if !has(program) {
            return;
        }
        for (link, arguments) in
            [("eth", &["-g", "1"][..]), ("eth", &["-g", "3", "-e"]), ("ib", &[]), ("ib", &["-e"])]
        {
            let mut all = vec!["-c", "-n", "100"];
            all.extend(arguments);
            let text = pair(program, link, &all);
            assert!(text.contains("100 iters in"), "{program} {link} {arguments:?}: {text}");
        }
    }
}

#[test]
fn perftest_passes() {
    for (program, arguments) in [
        ("ib_write_lat", &[][..]),
        ("ib_write_bw", &["-q", "4", "--post_list", "8"]),
        ("ib_write_bw", &["-b"]),
        ("ib_read_lat", &[]),
        ("ib_read_bw", &[]),
        ("ib_send_lat", &["-c", "UD"]),
        ("ib_send_bw", &["-e"]),
        ("ib_send_bw", &["--use-srq"]),
        ("ib_atomic_lat", &[]),
        ("ib_atomic_bw", &["-A", "CMP_AND_SWAP"]),
    ] {
        if !has(program) {
            return;
        }
        for &link in tier(&["eth"][..], &["eth", "ib"], &["eth", "ib"]) {
            let mut all = vec!["-n", "200"];
            all.extend(arguments);
            let text = pair(program, link, &all);
            assert!(text.contains("      200 ") || text.contains(" 800 "), "{program} {arguments:?}: {text}");
        }
    }
}

/// UCX writes requests and reads completions of the mlx5 transports by its own code.
#[test]
fn ucx_passes() {
    if !has("ucx_perftest") {
        return;
    }
    for test in ["tag_lat", "tag_bw", "ucp_put_lat", "ucp_get", "ucp_fadd"] {
        for transports in ["rc_verbs,ud_verbs", "rc_mlx5,ud_mlx5"] {
            for link in ["eth", "ib"] {
                ucx(test, link, &[("UCX_TLS", transports)]);
            }
        }
    }
}

/// One test of `ucx_perftest` between two processes. Returns what the client printed.
fn ucx(test: &str, link: &str, variables: &[(&str, &str)]) -> String {
    let port = free_port();
    let number = port.to_string();
    let program = |arguments: &[&str]| {
        let mut command = card("ucx_perftest", link);
        command.args(["-p", &number]).args(arguments).envs(variables.iter().copied());
        start(command.env("UCX_NET_DEVICES", "mlx5_0:1"))
    };
    let mut server = program(&[]);
    await_server(&mut server, port);
    let client = finish(program(&["127.0.0.1", "-t", test, "-n", "100", "-w", "5"]));
    let server = finish(server);
    let name = format!("{test}, {variables:?}, {link}");
    succeeded(&name, &server);
    let printed = succeeded(&name, &client);
    assert!(printed.contains("Final:"), "{name}");
    printed
}

/// UCX makes queue pairs and shared receive queues by DevX where messages may have 1 GiB.
#[test]
fn ucx_passes_by_devx() {
    if !has("ucx_perftest") {
        return;
    }
    let variables =
        [("UCX_TLS", "rc_mlx5,ud_mlx5"), ("GDASYNC_CARD_MODES", "log-max-msg"), ("UCX_LOG_LEVEL", "debug")];
    for link in ["eth", "ib"] {
        for test in ["tag_lat", "tag_bw", "ucp_get"] {
            let printed = ucx(test, link, &variables);
            assert!(printed.contains("opened DEVX md"), "{printed}");
        }
    }
}

#[test]
fn the_files_of_the_device_are_seen_by_other_programs() {
    let names = run("ls", "eth", &["/sys/class/infiniband", "/sys/class/infiniband/mlx5_0/ports/1"]);
    assert!(names.contains("mlx5_0") && names.contains("gid_attrs"), "{names}");
    let text = run("cat", "eth", &["/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3"]);
    assert_eq!(text, "RoCE v2\n");
    let text = run("sh", "eth", &["-c", "read line < /sys/class/infiniband/mlx5_0/node_type; echo $line"]);
    assert_eq!(text, "1: CA\n");
}

#[test]
fn gpu_memory_is_registered_and_gpus_ring_doorbells() {
    let Some(program) = build("gpu", include_str!("gpu.c"), &["-libverbs", "-lmlx5"]) else { return };
    let arguments = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"];
    let Some(driver) = build("cuda", include_str!("libcuda.c"), &arguments) else { return };
    let dir = driver.parent().expect("it is in a directory");
    // Found under all names before that of the system.
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(&driver, dir.join(name)).expect("a directory of this test");
    }
    let arguments = ["-shared", "-fPIC", "-fvisibility=hidden"];
    let Some(interposer) = build("interposer", include_str!("interposer.c"), &arguments) else { return };
    let outputs = [None, Some(&interposer)].map(|interposer| {
        let mut command = card(program.to_str().expect("temporary directories have plain names"), "eth");
        command.arg(dir.join("libcuda.so.1")).env("LD_LIBRARY_PATH", dir).env("GDASYNC_CARD_LOG", "-");
        if let Some(interposer) = interposer {
            let both = [library(), interposer.clone()].map(|path| path.display().to_string());
            command.env("LD_PRELOAD", both.join(":"));
        }
        finish(start(&mut command))
    });
    for file in [&program, &driver, &interposer] {
        std::fs::remove_dir_all(file.parent().expect("it is in a directory")).expect("it is ours");
    }
    for output in outputs {
        assert_eq!(succeeded("gpu.c", &output), "payload\ndoorbell\ndone\n");
    }
}
