//! Cards and libraries on which the rings cannot be read by the card.

use gdsync::Device;
use gdsync::Error;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::Context;

use crate::common::{Side, connect, hca};
use crate::setup::CARD;
use crate::{DEAF, OLD_LIBRARY, Quirks, message};

/// Messages travel whoever reads the rings.
fn talk(context: &Context) {
    let (a, b) = connect(Side::new(context, 64, |q| q), Side::new(context, 64, |q| q));
    message(&a, &b, 1);
}

#[test]
fn without_quirks_the_card_reads_the_rings() {
    let _quirks = Quirks::of(0);
    let context = hca();
    assert_eq!(context.not_direct(), None);
    talk(&context);
}

#[test]
fn a_card_that_does_not_see_our_doorbells_is_left_to_the_proxy() {
    let _quirks = Quirks::of(DEAF);
    let context = hca();
    let why = context.not_direct().expect("the self-test fails");
    assert!(why.contains("rang its doorbell") && why.contains("no completion"), "{why}");
    assert!(context.description().contains("proxy"), "{}", context.description());
    talk(&context);
}

#[test]
fn a_route_that_was_asked_for_is_not_tested() {
    let _quirks = Quirks::of(DEAF);
    let config = DeviceConfig { route: Some(Route::Direct), ..DeviceConfig::default() };
    let context = Device::find(Some(CARD)).unwrap().open_with(&config).unwrap();
    assert_eq!((context.description(), context.not_direct()), ("mlx5 card mlx5_standin", None));
}

#[test]
fn a_library_that_is_too_old_is_left_to_the_proxy() {
    let _quirks = Quirks::of(OLD_LIBRARY);
    let context = hca();
    let why = context.not_direct().expect("no completion queue can be made");
    assert!(why.contains("rdma-core 31"), "{why}");
    talk(&context);
    let config = DeviceConfig { route: Some(Route::Direct), ..DeviceConfig::default() };
    let forced = Device::find(Some(CARD)).unwrap().open_with(&config).unwrap();
    let error = forced.alloc_pd().unwrap().build_qp().build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { by: "the installed libmlx5", .. }), "{error:?}");
}
