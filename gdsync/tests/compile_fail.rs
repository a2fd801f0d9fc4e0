//! Mistakes that types catch: each file must be refused, for the reason written beside it.

#[test]
fn mistakes_are_refused() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
