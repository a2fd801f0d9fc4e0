//! The software HCA over libfabric: tests of other modules once more, in a process whose device is one of its providers, where it is
//! installed.

use gdsync::verbs::Context;
use gdsync::{Device, Error};

use crate::common::{Side, connect, message, tier};
use crate::tcp::over;
use gdsync_testkit::process::built;

/// Providers that need no card, at the loopback interface.
const DEVICES: [&str; 3] = ["fabric:tcp@lo", "fabric:tcp;ofi_rxm@lo", "fabric:shm@lo"];

fn open(device: &str) -> Option<Context> {
    match Device::find(Some(device)).unwrap().open() {
        Ok(context) => Some(context),
        Err(Error::Library(error)) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{device}: {error}"),
    }
}

fn over_libfabric(device: &str, tests: &[&str]) {
    if open(device).is_some() {
        over(device, None, tests);
    }
}

#[test]
fn two_hcas_exchange_messages() {
    for device in DEVICES {
        let (Some(first), Some(second)) = (open(device), open(device)) else { return };
        let wire = first.wire().to_owned();
        assert!(wire.starts_with("libfabric ("), "{wire}");
        assert!(first.is_software() && first.reaches_other_hosts() && second.wire() == wire);
        let (a, b) = connect(Side::new(&first, 4096, |q| q), Side::new(&second, 4096, |q| q));
        (0..100).for_each(|n| message(&a, &b, n));
        (0..100).for_each(|n| message(&b, &a, n));
    }
}

#[test]
fn queues_do_what_the_model_does() {
    DEVICES.iter().for_each(|device| over_libfabric(device, &["model::queues_do_what_the_model_does"]));
}

#[test]
fn queues_do_what_the_model_does_over_providers_of_cards() {
    for device in ["fabric:efa@lo", "fabric:cxi@lo"] {
        over(device, Some(built("libstand_in_fabric.so")), &["model::queues_do_what_the_model_does"]);
    }
}

#[test]
fn two_processes_see_each_other_end() {
    over_libfabric("fabric:tcp@lo", &["processes::"]);
}

/// Takes more than a minute.
#[test]
fn faults_queues_and_streams_are_the_same() {
    if tier(false, false, true) {
        over_libfabric(
            "fabric:tcp@lo",
            &["faults::", "syndromes::", "queues::", "streams::", "verbs::", "regressions::"],
        );
    }
}
