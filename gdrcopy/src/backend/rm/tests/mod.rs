//! The backend on a simulated driver.

mod abi;
