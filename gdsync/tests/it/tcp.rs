//! The software HCA over TCP: tests of other modules once more, in a process whose device is `tcp:lo`.

use std::path::PathBuf;

use gdsync::Device;
use gdsync::Error;
use gdsync::verbs::QpAddress;

use crate::child::rerun_all;
use crate::common::{Side, connect, is_device_named, message, tier};

/// Runs tests of other modules with this device, and this libfabric in place of the installed one, unless this process is such a run,
/// or the tier is the fast one.
pub(crate) fn over(device: &str, libfabric: Option<PathBuf>, tests: &[&str]) {
    if is_device_named() || tier(true, false, false) {
        return;
    }
    let mut run = rerun_all(tests);
    run.env("GDSYNC_TEST_DEVICE", device).env("GDSYNC_STRICT", "1");
    // What a wire changes shows with small counts; to meet a fault takes new devices, which open slowly.
    run.env("GDSYNC_TEST_TIER", tier("fast", "fast", "full"));
    run.envs(libfabric.map(|path| ("GDSYNC_LIBFABRIC", path)));
    let output = run.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && !out.contains(" 0 passed"),
        "{device}: {}\n{out}\n{err}",
        output.status
    );
}

fn over_tcp(tests: &[&str]) {
    over("tcp:lo", None, tests);
}

#[test]
fn queues_do_what_the_model_does() {
    over_tcp(&["model::queues_do_what_the_model_does"]);
}

#[test]
fn two_processes_see_each_other_end() {
    over_tcp(&["processes::"]);
}

#[test]
fn faults_and_syndromes_are_the_same() {
    over_tcp(&["faults::", "syndromes::"]);
}

#[test]
fn queues_and_streams_are_the_same() {
    over_tcp(&["queues::", "streams::", "verbs::", "regressions::"]);
}

#[test]
fn addresses_are_those_of_the_internet() {
    for (name, ip) in [("tcp:127.0.0.1", "127.0.0.1"), ("tcp:lo", "127.0.0.1"), ("tcp:::1", "::1")] {
        let device = Device::find(Some(name)).unwrap();
        assert_eq!((device.name(), device.is_software()), (name, true));
        let open = || match device.open() {
            Ok(context) => Some(context),
            Err(Error::Sys { .. }) if ip == "::1" => None,
            Err(error) => panic!("{error}"),
        };
        // A machine may be without IPv6.
        let (Some(first), Some(second)) = (open(), open()) else { continue };
        assert!(first.is_software() && first.reaches_other_hosts() && first.wire() == "TCP");
        let (a, b) = connect(Side::new(&first, 4096, |q| q), Side::new(&second, 4096, |q| q));
        let ip: std::net::IpAddr = ip.parse().unwrap();
        let mapped = match ip {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            std::net::IpAddr::V6(v6) => v6,
        };
        let addresses = [&a, &b].map(|side| side.qp.address());
        assert!(addresses.iter().all(|address| address.gid.0 == mapped.octets() && address.lid != 0));
        assert_ne!(addresses[0].lid, addresses[1].lid, "one host, two ports");
        assert_eq!(QpAddress::from_bytes(&addresses[0].to_bytes()).unwrap(), addresses[0]);
        (0..100).for_each(|n| message(&a, &b, n));
        (0..100).for_each(|n| message(&b, &a, n));
    }
    for bad in ["tcp:0.0.0.0", "tcp:nothing-of-this-name", "tcp:"] {
        assert!(matches!(Device::find(Some(bad)), Err(Error::InvalidArgument { .. })), "{bad}");
    }
    assert!(matches!(Device::find(Some("tcp0")), Err(Error::NoDevice { .. })));
    let elsewhere = Device::find(Some("tcp:192.0.2.1")).unwrap().open().unwrap_err().to_string();
    assert!(elsewhere.contains("tcp:ADDRESS"), "{elsewhere}");
}
