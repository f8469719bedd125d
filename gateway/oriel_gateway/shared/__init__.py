"""Work that several calls share: kept answers, single flights, shadow copies, filtered model lists."""
