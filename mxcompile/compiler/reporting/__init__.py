"""Reports and checks of compiled and uncompiled layers."""
