//! What is kept, what goes, and what happens where a device has no room.

use super::super::config::CacheConfig;
use super::*;
use crate::cache::CacheStats;

#[test]
fn a_range_is_registered_once_and_serves_its_parts() {
    let bed = Bed::new(1, config(8, 1 << 20));
    let first = bed.get(100..200);
    let keys = first.0.lkey();
    drop(first);
    for part in [100..200, 100..101, 199..200, 120..180] {
        assert_eq!(bed.get(part).0.lkey(), keys);
    }
    let CacheStats { hits, misses, entries, bytes, .. } = bed.cache.stats();
    assert_eq!((hits, misses, entries, bytes), (4, 1, 1, 100));
    let part = bed.get(120..130);
    part.memory().write(0, b"0123456789").unwrap();
    assert_eq!(&bed.memory.to_vec()[120..130], b"0123456789");
    assert_eq!(part.0.sge(2, 3).unwrap().addr, bed.memory.addr() + 122);
    assert!(part.0.sge(8, 3).is_err(), "a part ends where it ends");
}

#[test]
fn what_was_not_used_for_longest_goes_first_and_what_is_used_stays() {
    let bed = Bed::new(64, config(3, 1 << 20));
    let held = bed.get(0..10);
    bed.get(20..30);
    bed.get(40..50);
    bed.get(20..25);
    bed.get(60..70);
    assert_eq!(bed.kept(), [(0, 10), (20, 30), (60, 70)]);
    bed.get(80..90);
    assert_eq!(bed.kept(), [(0, 10), (60, 70), (80, 90)]);
    drop(held);
    bed.get(100..110);
    assert_eq!(bed.kept(), [(60, 70), (80, 90), (100, 110)]);
    assert_eq!(bed.cache.stats().evictions, 3);
}

#[test]
fn a_message_under_way_counts_as_a_use() {
    let bed = Bed::new(64, config(1, 1 << 20));
    let message = Registration::clone(&bed.get(0..10));
    let other = bed.get(20..30);
    assert_eq!((bed.kept(), bed.cache.stats().uncached), (vec![(0, 10)], 1));
    drop((message, other));
    bed.get(20..30);
    assert_eq!(bed.kept(), [(20, 30)]);
}

#[test]
fn bytes_are_bounded_and_what_cannot_fit_evicts_nothing() {
    let bed = Bed::new(64, config(64, 100));
    bed.get(0..40);
    bed.get(100..140);
    bed.get(200..301);
    assert_eq!((bed.kept(), bed.cache.stats().uncached), (vec![(0, 40), (100, 140)], 1));
    bed.get(200..300);
    let stats = bed.cache.stats();
    assert_eq!((bed.kept(), stats.bytes, stats.evictions), (vec![(200, 300)], 100, 2));
}

#[test]
fn ranges_that_overlap_become_one() {
    let bed = Bed::new(64, config(8, 100));
    bed.get(0..20);
    let held = bed.get(30..50);
    bed.get(10..40);
    assert_eq!((bed.kept(), bed.cache.stats().merged), (vec![(0, 50)], 2));
    held.memory().write(0, b"still registered").unwrap();
    bed.get(50..60);
    assert_eq!(bed.kept(), [(0, 50), (50, 60)], "neighbours do not overlap");
    bed.get(40..141);
    assert_eq!((bed.kept(), bed.cache.stats().uncached), (vec![(0, 50), (50, 60)], 1), "too long to be kept");
    bed.get(59..100);
    bed.get(99..150);
    assert_eq!(bed.kept(), [(50, 150)], "the oldest made room");
    bed.get(149..160);
    assert_eq!(bed.kept(), [(149, 160)], "together they would be too long");
}

#[test]
fn what_is_invalidated_is_registered_again() {
    let bed = Bed::new(64, config(8, 1 << 20));
    for part in [0..10, 10..20, 20..30] {
        bed.get(part);
    }
    assert_eq!(bed.invalidate(5..11), 2);
    assert_eq!(bed.invalidate(5..11), 0);
    assert_eq!(bed.kept(), [(20, 30)]);
    let held = bed.get(20..30);
    assert_eq!(bed.cache.clear(), 1);
    assert_eq!(bed.cache.stats().entries, 0);
    held.memory().write(0, b"registered").unwrap();
    let misses = bed.cache.stats().misses;
    bed.get(20..30);
    assert_eq!(bed.cache.stats().misses, misses + 1);
}

#[test]
fn a_device_without_room_gets_some() {
    let bed = Bed::new(3, config(64, 1 << 20));
    let held = bed.get(0..10);
    bed.get(20..30);
    bed.get(40..50);
    bed.get(60..80);
    assert_eq!(bed.kept(), [(0, 10), (60, 80)], "as many bytes as are wanted");
    let (second, third) = (bed.get(60..70), bed.get(100..110));
    let error = bed.try_get(120..130).unwrap_err();
    assert!(error.is_exhausted(), "{error}");
    assert!(error.to_string().contains("deregister"), "{error}");
    drop((second, third));
    bed.get(120..130);
    drop(held);
    bed.get(140..160);
    assert_eq!(bed.kept(), [(120, 130), (140, 160)]);
}

#[test]
fn an_error_that_is_no_lack_of_room_evicts_nothing() {
    let bed = Bed::new(64, config(64, 1 << 20));
    bed.get(0..10);
    let refuse = |_: &Memory| Err(gdsync::Error::OutOfBounds { offset: 1, len: 2, size: 3 });
    // SAFETY: the memory stays until the test ends.
    let refused = unsafe { bed.cache.get(None, &bed.at(&(20..30)), refuse) };
    assert!(matches!(refused, Err(gdsync::Error::OutOfBounds { .. })), "{refused:?}");
    assert_eq!((bed.kept(), bed.cache.stats().evictions), (vec![(0, 10)], 0));
}

/// The pages between may be gone, or of another kind.
#[test]
fn what_cannot_be_registered_together_is_registered_alone() {
    let bed = Bed::new(64, config(64, 1 << 20));
    bed.get(0..20);
    let only_short = |memory: &Memory| match memory.len() {
        10 => bed.register(memory),
        _ => Err(gdsync::Error::OutOfBounds { offset: 0, len: memory.len(), size: 10 }),
    };
    // SAFETY: the memory stays until the test ends.
    drop(unsafe { bed.cache.get(None, &bed.at(&(15..25)), only_short) }.unwrap());
    assert_eq!(bed.kept(), [(15, 25)]);
}

#[test]
fn nothing_is_kept_where_it_is_off() {
    for (keep, variable) in [(Keep::Nothing, None), (Keep::All, Some("off")), (Keep::All, Some(" gpu "))] {
        let bed = Bed::new(1, CacheConfig { keep, ..config(8, 1 << 20) }.with(variable).unwrap());
        drop(bed.get(0..10));
        let held = bed.get(0..10);
        assert!(bed.try_get(0..10).unwrap_err().is_exhausted(), "the device has one region");
        drop(held);
        bed.get(5..15);
        let stats = CacheStats { uncached: 3, ..CacheStats::default() };
        assert_eq!(bed.cache.stats(), stats, "{keep:?} {variable:?}");
    }
    let on = CacheConfig { keep: Keep::Nothing, ..CacheConfig::default() }.with(Some("on")).unwrap();
    assert_eq!(on, CacheConfig::default());
    let error = CacheConfig::default().with(Some("yes")).unwrap_err().to_string();
    assert!(error.contains("MP_REG_CACHE") && error.contains("'yes'") && error.contains("off"), "{error}");
}

#[test]
fn no_entries_means_nothing_is_kept() {
    let bed = Bed::new(1, config(0, 1 << 20));
    drop(bed.get(0..10));
    drop(bed.get(0..10));
    assert_eq!(bed.cache.stats(), CacheStats { uncached: 2, ..CacheStats::default() });
}
