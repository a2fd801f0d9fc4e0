//! How long the long tests run: the variable `GDSYNC_TEST_TIER`.
#![allow(dead_code, unreachable_pub, reason = "three test programs use it")]

/// What a test takes in each tier of `GDSYNC_TEST_TIER`: `fast`, `full` (the default), `long`.
pub fn tier<T>(fast: T, full: T, long: T) -> T {
    match std::env::var("GDSYNC_TEST_TIER").as_deref() {
        Ok("fast") => fast,
        Ok("full" | "") | Err(_) => full,
        Ok("long") => long,
        Ok(other) => panic!("GDSYNC_TEST_TIER is '{other}', not fast, full or long"),
    }
}
