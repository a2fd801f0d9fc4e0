//! The software HCA over libfabric: tests of other modules once more, in a process whose device is one of its providers, where it is
//! installed.

use gdsync::verbs::Context;
use gdsync::{Device, Error};

use crate::common::{Side, connect, message};
use crate::tcp::over;

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

fn over_libfabric(devices: &[&str], tests: &[&str]) {
    if open(DEVICES[0]).is_some() {
        devices.iter().for_each(|device| over(device, tests));
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
    over_libfabric(&DEVICES, &["model::queues_do_what_the_model_does"]);
}

#[test]
fn two_processes_see_each_other_end() {
    over_libfabric(&DEVICES, &["processes::"]);
}

#[test]
fn faults_and_syndromes_are_the_same() {
    over_libfabric(&DEVICES[..1], &["faults::", "syndromes::"]);
}

#[test]
fn queues_and_streams_are_the_same() {
    over_libfabric(&DEVICES[..1], &["queues::", "streams::", "verbs::", "regressions::"]);
}
